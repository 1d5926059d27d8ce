"""Binds the Triton dispatch to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal_kernels.moe_dispatch.triton_kernels import (
    _moe_combine_kernel,
    _moe_invert_kernel,
    _moe_places_kernel,
    _moe_spread_kernel,
)
from hal_kernels.moe_dispatch.triton_variants import (
    COLUMNS,
    FEW_CHOICES,
    MANY_CHOICES,
    rows_warps,
)

_ROWS = 1024  # of one program that inverts the order


def bind(request: MoeDispatchRequest, device: DeviceSpec) -> Callable[..., Any]:
    """As the op's reference: kernel(x, ids), or kernel(y, source, weights). Raises ValueError if an
    id is not of an expert, or rows and sources differ.

    Of a captured graph nothing is read back: there are as many rows as choices, and a token with an
    id of no expert is NaN in its rows and in the sum, also one that has no rows.
    """
    experts, top_k, hidden = request.num_experts, request.top_k, request.hidden_size
    block = min(COLUMNS, triton.next_power_of_2(hidden))
    blocks = -(-hidden // block)
    num_warps = rows_warps(request.dtype, int(device.attributes.get("warp_size", 32)))

    def permute(
        x: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, ids = _adjacent(x), ids.contiguous()
        choices = ids.numel()
        places, source = torch.empty((2, choices), dtype=torch.int32, device=x.device)
        offsets = torch.empty(experts + 2, dtype=torch.int64, device=x.device)
        _moe_places_kernel[(experts + 1,)](
            ids, places, source, offsets, choices, E=experts, BLOCK_F=_choices_block(choices)
        )
        rows = torch.empty((choices, hidden), dtype=x.dtype, device=x.device)
        if choices:
            _moe_spread_kernel[(ids.shape[0], blocks)](
                x, ids, places, rows, x.stride(0), hidden, experts,
                TOP_K=top_k, BLOCK_D=block, num_warps=num_warps,
            )  # fmt: skip
        if request.graph_mode == "graph":
            return rows, offsets[: experts + 1], source
        # How many rows there are is part of the result: the only time that the host waits.
        count, foreign = offsets[experts:].tolist()
        if foreign:
            raise ValueError(
                f"moe_dispatch: required ids from -1 to {experts - 1}, "
                f"found {int(ids.min())} to {int(ids.max())}"
            )
        return rows[:count], offsets[: experts + 1], source[:count]

    def combine(y: torch.Tensor, source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(y) != len(source):
            raise ValueError(
                f"moe_dispatch: required a source for each of {len(y)} rows, found {len(source)}"
            )
        y, tokens = _adjacent(y), weights.shape[0]
        places = torch.full((tokens * top_k,), -1, dtype=torch.int32, device=y.device)
        out = torch.empty((tokens, hidden), dtype=y.dtype, device=y.device)
        if len(y):
            _moe_invert_kernel[(-(-len(y) // _ROWS),)](
                source.contiguous(), places, len(y), BLOCK_M=_ROWS
            )
        if tokens:
            _moe_combine_kernel[(tokens, blocks)](
                y, places, weights.contiguous(), out, y.stride(0), hidden,
                TOP_K=top_k, BLOCK_D=block, num_warps=num_warps,
            )  # fmt: skip
        return out

    return permute if request.kind == "permute" else combine


def _choices_block(choices: int) -> int:
    """Ids that a program reads at once: a decode in one step, a long prefill in wide ones."""
    return FEW_CHOICES if choices <= FEW_CHOICES else MANY_CHOICES


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
