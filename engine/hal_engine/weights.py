"""Reads a rank's weights out of a checkpoint in the formats that the plan says.

Tensors that one matrix product uses together are packed along their rows (q, k, v; gate, up). Only
the rows or columns of this rank are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hal.ops.formats import FORMATS, QuantizedWeight, WeightFormat, torch_dtype
from hal_engine.checkpoint.protocol import Checkpoint

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor's share in a packed weight: None keeps all rows or columns."""

    name: str
    rows: Range | None = None
    columns: Range | None = None


def quantize_per_channel(weight: torch.Tensor) -> QuantizedWeight:
    """Symmetric int8 with one fp32 scale per row of weight [N, K]; rounds half to even."""
    exact = weight.float()
    peak = exact.abs().amax(dim=1)
    scale = torch.where(peak > 0, peak / 127.0, torch.ones_like(peak))
    data = torch.round(exact / scale[:, None]).clamp(-127, 127).to(torch.int8)
    return QuantizedWeight(format=FORMATS["int8_channel"], data=data, scale=scale)


def read_weight(
    checkpoint: Checkpoint, parts: Sequence[Part], target: WeightFormat, *, pad_rows_to: int = 0
) -> torch.Tensor | QuantizedWeight:
    """The packed weight of `parts` in `target`: dense tensor [N, K] or QuantizedWeight."""
    stored_in_groups = target.group_size not in (None, 0)
    if stored_in_groups:
        return _read_groups(checkpoint, parts, target, pad_rows_to)
    dtype = torch_dtype(target.name) if target.is_dense else torch.float32
    blocks = [
        checkpoint.read_float(p.name, rows=_as_slice(p.rows), cols=_as_slice(p.columns)).to(dtype)
        for p in parts
    ]
    weight = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    weight = _pad_rows(weight, pad_rows_to).contiguous()
    if target.is_dense:
        return weight
    quantized = quantize_per_channel(weight)
    return QuantizedWeight(format=target, data=quantized.data, scale=quantized.scale)


def _read_groups(
    checkpoint: Checkpoint, parts: Sequence[Part], target: WeightFormat, pad_rows_to: int
) -> QuantizedWeight:
    stored = [
        checkpoint.read_blocks(p.name, rows=_as_slice(p.rows), cols=_as_slice(p.columns))
        for p in parts
    ]
    data = [weight.data for weight in stored]
    scale = [weight.scale for weight in stored]
    minimum = [weight.minimum for weight in stored if weight.minimum is not None]
    return QuantizedWeight(
        format=target,
        data=_pad_rows(torch.cat(data), pad_rows_to).contiguous(),
        scale=_pad_rows(torch.cat(scale), pad_rows_to).contiguous(),
        minimum=_pad_rows(torch.cat(minimum), pad_rows_to).contiguous() if minimum else None,
    )


def _as_slice(bounds: Range | None) -> slice | None:
    return None if bounds is None else slice(*bounds)


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows below, for the last rank's share of a vocabulary that does not divide."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    return torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))
