"""Four-bit weights as GPTQ, AWQ and compressed-tensors pack them: ours without loss, or refused.

All three hold eight values in an int32, the first in its lowest bits, a scale for each output
feature and group along K, and a zero point beside it; a value is (q - zero) * scale. GPTQ packs
along K, AWQ along N with its columns interleaved, compressed-tensors along K of rows that are
output features. Where every zero point is 8 the weight is symmetric.
"""

from __future__ import annotations

import torch

from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.low_precision import pack_nibbles

GROUPS = (32, 64, 128)
_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
_MIDDLE = 8


def int4_from_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    g_idx: torch.Tensor | None = None,
    stores_zeros_minus_one: bool = True,
) -> QuantizedWeight:
    """The weight [N, K] of a GPTQ layer.

    qweight: int32 [K/8, N]. qzeros: int32 [K/group, N/8]; stores_zeros_minus_one: of checkpoint
    format "gptq", not of "gptq_v2". scales: [K/group, N]. g_idx: the group of each column.

    Raises:
        ValueError: groups that are not in order along K, a zero point that the first format cannot
            tell from 16, scales that float16 does not hold, or shapes that do not fit.
    """
    columns, features = qweight.shape[0] * _PER_WORD, qweight.shape[1]
    group = _group_of(columns, scales.shape[0])
    if g_idx is not None and not torch.equal(
        g_idx.long(), torch.arange(columns, device=g_idx.device) // group
    ):
        raise ValueError(
            f"GPTQ weight [{features}, {columns}]: required groups of {group} columns in order, "
            "found others in g_idx (desc_act); quantise it with desc_act false"
        )
    values = _unpacked(qweight.T)
    zeros = _unpacked(qzeros).T
    if stores_zeros_minus_one:
        if bool((zeros == 15).any()):
            raise ValueError(
                f"GPTQ weight [{features}, {columns}]: required zero points of 1 to 15 as format "
                '"gptq" stores them, found 0 or 16, which it does not tell apart; store it as '
                '"gptq_v2"'
            )
        zeros = zeros + 1
    return _weight(values, scales.T, zeros)


def int4_from_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> QuantizedWeight:
    """The weight [N, K] of an AWQ layer (version "gemm").

    qweight: int32 [K, N/8]. qzeros: int32 [K/group, N/8]. scales: [K/group, N]. Raises ValueError
    for scales that float16 does not hold, or shapes that do not fit.
    """
    values, zeros = (_unpacked(one, _AWQ_ORDER) for one in (qweight, qzeros))
    return _weight(values.T, scales.T, zeros.T)


def int4_from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
) -> QuantizedWeight:
    """The weight [N, K] of a layer in format "pack-quantized" with groups.

    weight_packed: int32 [N, K/8]. weight_scale: [N, K/group]. weight_zero_point: int32
    [N/8, K/group], None for a symmetric one. Raises ValueError for scales that float16 does not
    hold, or shapes that do not fit.
    """
    values = _unpacked(weight_packed)
    zeros = None if weight_zero_point is None else _unpacked(weight_zero_point.T).T
    if zeros is not None:
        zeros = zeros[: values.shape[0]]  # a last word may be filled up
    return _weight(values, weight_scale, zeros)


def _group_of(columns: int, groups: int) -> int:
    group = columns // groups if groups else 0
    if group not in GROUPS or columns % group:
        raise ValueError(
            f"weight of four bits: required groups of 32, 64 or 128 columns, found {groups} of "
            f"{columns} columns"
        )
    return group


def _unpacked(
    words: torch.Tensor, order: tuple[int, ...] = tuple(range(_PER_WORD))
) -> torch.Tensor:
    """uint8 [R, 8 C] of int32 [R, C]. order: of each nibble its place among the eight."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(
            "weight of four bits: required eight values in an int32 of a matrix, found "
            f"{words.dtype} {list(words.shape)}"
        )
    shifts = torch.arange(0, 4 * _PER_WORD, 4, device=words.device, dtype=torch.int32)
    nibbles = ((words[..., None] >> shifts) & 15).to(torch.uint8)
    placed = torch.empty_like(nibbles)
    placed[..., list(order)] = nibbles
    return placed.flatten(1)


def _weight(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedWeight:
    """values: uint8 [N, K]. scales, zeros: [N, K/group]; zeros None where all are 8."""
    features, columns = values.shape
    group = _group_of(columns, scales.shape[1])
    for name, found in (("scales", scales), ("zero points", zeros)):
        if found is not None and tuple(found.shape) != (features, columns // group):
            raise ValueError(
                f"weight of four bits [{features}, {columns}]: required {name} "
                f"{[features, columns // group]}, found {list(found.shape)}"
            )
    held = scales.to(torch.float16).contiguous()
    if not torch.equal(held.to(scales.dtype), scales):
        raise ValueError(
            f"weight of four bits [{features}, {columns}]: required scales that float16 holds "
            f"exactly, found others in {scales.dtype}; quantise it with scales in float16"
        )
    data = pack_nibbles(values.contiguous())
    if zeros is None or bool((zeros == _MIDDLE).all()):
        return QuantizedWeight(format=FORMATS[f"int4_g{group}"], data=data, scale=held)
    if group == 32:  # its format adds a minimum, which the product with a scale may not be exactly
        minimum = -zeros.float() * held.float()
        if not torch.equal(minimum.half().float(), minimum):
            raise ValueError(
                f"weight of four bits [{features}, {columns}]: required zero points of groups of "
                "32 whose product with the scale float16 holds, found others; quantise it in "
                "groups of 64 or 128"
            )
        return QuantizedWeight(
            format=FORMATS["int4_g32_asym"], data=data, scale=held, minimum=minimum.half()
        )
    return QuantizedWeight(
        format=FORMATS[f"int4_g{group}_zero"],
        data=data,
        scale=held,
        minimum=zeros.to(torch.float16).contiguous(),
    )
