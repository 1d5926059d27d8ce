"""Four-bit weights as GPTQ, AWQ and compressed-tensors pack them: ours without loss, or refused.

All three hold eight values in an int32, the first in its lowest bits, a scale for each output
feature and group along K, and a zero point beside it; a value is (q - zero) * scale. GPTQ packs
along K, AWQ along N with its columns interleaved, compressed-tensors along K of rows that are
output features. Where every zero point is 8 the weight is symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hal.ops.formats import FORMATS, QuantizedWeight
from hal.ops.low_precision import pack_nibbles

GROUPS = (32, 64, 128)
_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
_MIDDLE = 8
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


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
    _check_matrices(qweight, qzeros, scales)
    columns, features = qweight.shape[0] * _PER_WORD, qweight.shape[1]
    group = _group_of(columns, scales.shape[0])
    if g_idx is not None and not _is_in_order(g_idx, columns, group):
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
    _check_matrices(qweight, qzeros, scales)
    values, zeros = (_unpacked(one, _AWQ_ORDER) for one in (qweight, qzeros))
    return _weight(values.T, scales.T, zeros.T)


def int4_from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    *,
    weight_shape: torch.Tensor | Sequence[int],
    weight_g_idx: torch.Tensor | None = None,
) -> QuantizedWeight:
    """The weight [N, K] of a layer in format "pack-quantized" with groups.

    weight_packed: int32 [N, K/8]. weight_scale: [N, K/group]. weight_zero_point: int32
    [N/8, K/group], None for a symmetric one. weight_shape: N and K as the checkpoint has them,
    which tell four bits from others. weight_g_idx: the group of each column, where the checkpoint
    has it (actorder).

    Raises:
        ValueError: another number of bits, groups that are not in order along K, scales that
            float16 does not hold, or shapes that do not fit.
    """
    _check_matrices(weight_packed, weight_zero_point, weight_scale)
    features, columns = (int(one) for one in weight_shape)
    who = f"pack-quantized weight [{features}, {columns}]"
    _check_words(who, "weight_packed", weight_packed, (features, -(-columns // _PER_WORD)))
    group = _group_of(columns, weight_scale.shape[1])
    is_indexed = weight_g_idx is not None and not bool((weight_g_idx == -1).all())  # -1: unused
    if weight_g_idx is not None and is_indexed and not _is_in_order(weight_g_idx, columns, group):
        raise ValueError(
            f"{who}: required groups of {group} columns in order, found others in weight_g_idx; "
            "quantise it with actorder null or weight"
        )
    zeros = None
    if weight_zero_point is not None:
        rows = -(-features // _PER_WORD)
        _check_words(who, "weight_zero_point", weight_zero_point, (rows, columns // group))
        zeros = _unpacked(weight_zero_point.T).T[:features]  # a last word may be filled up
    return _weight(_unpacked(weight_packed), weight_scale, zeros)


def _check_words(who: str, name: str, words: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(words.shape) != shape:
        raise ValueError(
            f"{who}: required {name} {list(shape)}, eight values of four bits in an int32, found "
            f"{list(words.shape)}, of another shape or number of bits"
        )


def _check_matrices(words: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor) -> None:
    """Raises ValueError for packed values that are no int32 matrix, or scales that are none of
    finite numbers."""
    for packed in (words, zeros):
        if packed is not None and (packed.dtype != torch.int32 or packed.dim() != 2):
            raise ValueError(
                "weight of four bits: required eight values in an int32 of a matrix, found "
                f"{packed.dtype} {list(packed.shape)}"
            )
    if scales.dtype not in _SCALES or scales.dim() != 2:
        raise ValueError(
            "weight of four bits: required scales as a matrix in float16, bfloat16 or float32, "
            f"found {scales.dtype} {list(scales.shape)}"
        )
    if not bool(scales.isfinite().all()):
        raise ValueError(
            "weight of four bits: required finite scales, found infinity or NaN; the checkpoint is "
            "damaged, or was quantised with an overflow"
        )


def _is_in_order(g_idx: torch.Tensor, columns: int, group: int) -> bool:
    """Whether the groups of columns follow one another."""
    return torch.equal(g_idx.long(), torch.arange(columns, device=g_idx.device) // group)


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
