"""Norm, with residual add, and rounding of the normed rows in Triton: one row per program, kept in
registers, or read twice where it does not fit.

Suffixes of tensor names: R rows, H hidden size, G groups of a row. The norm is in float32; the
rules of rounding are those of `quantize`, whose scales these are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.quantize.code_kernels import _bits_of_e4m3
from hal_kernels.quantize.triton_kernels import _inverse_of_ue8m0, _scale_of, _ue8m0_code


@triton.jit
def _rounded(
    y, scale, scale_ptrs, is_group,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, IS_UE8M0: tl.constexpr,
    IS_BITS: tl.constexpr,
):  # fmt: skip
    """y[G, columns] in units of the scales [G], which are stored, and rounded if to integers or to
    the bits of e4m3fn."""
    if IS_UE8M0:
        code = _ue8m0_code(scale)
        tl.store(scale_ptrs, code.to(tl.uint8), mask=is_group)
        values = y * _inverse_of_ue8m0(code)[:, None]
    else:
        tl.store(scale_ptrs, scale, mask=is_group)
        values = y / scale[:, None]
    # The largest value may round past the format's largest: it is clamped to it. NaN stays.
    is_number = values == values
    values = tl.where(is_number, tl.minimum(tl.maximum(values, -LARGEST), LARGEST), values)
    if IS_INTEGER:
        # Half to even: 1.5 * 2**23 rounds a float32. An integer has no NaN: it is 0.
        values = tl.where(is_number, (values + 12582912.0) - 12582912.0, 0.0)
    if IS_BITS:
        values = _bits_of_e4m3(values)
    return values


@triton.jit
def _norm_quantize_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, values_RH_ptr, scale_RG_ptr,
    stride_x, stride_residual, H, num_groups, eps,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEPS_ROWS: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
    IS_UE8M0: tl.constexpr, IS_BITS: tl.constexpr,
):  # fmt: skip
    """values = (x + residual) / rms * weight in groups of GROUP columns, rounded from float32; the
    sum is written back to `residual`, and with KEEPS_ROWS the normed rows to `y`.

    BLOCK_G is a power of two of at least num_groups. IS_BITS: e4m3fn is rounded to in integers and
    stored as bits (uint8), for where Triton does not convert to FP8.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.arange(0, BLOCK_G)
    offs = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offs < H
    x = tl.load(x_RH_ptr + row * stride_x + offs, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_RH_ptr + row * stride_residual + offs, mask=inside, other=0.0)
        # Rounded to the activations' own dtype, as the layers of a model add.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_RH_ptr + row * stride_residual + offs, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / H
    weight = tl.load(weight_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    y = wide * (1.0 / tl.sqrt(mean + eps)) * weight
    if KEEPS_ROWS:
        tl.store(y_RH_ptr + row * H + offs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
    a = tl.abs(y)
    is_finite = tl.min((a < float("inf")).to(tl.int32), axis=1)
    scale = _scale_of(tl.max(a, axis=1), is_finite, LARGEST)
    scale_ptrs = scale_RG_ptr + row * num_groups + offs_g
    values = _rounded(
        y, scale, scale_ptrs, offs_g < num_groups, LARGEST, IS_INTEGER, IS_UE8M0, IS_BITS
    )  # fmt: skip
    tl.store(values_RH_ptr + row * H + offs, values.to(values_RH_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _norm_quantize_looped_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, values_RH_ptr, scale_RG_ptr,
    stride_x, stride_residual, H, num_groups, eps,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    KEEPS_ROWS: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
    IS_UE8M0: tl.constexpr, IS_BITS: tl.constexpr, IS_ROW: tl.constexpr,
):  # fmt: skip
    """As `_norm_quantize_kernel` over rows of any width, BLOCK_G groups at a time: first the sum of
    squares, then the results, from the row that the cache still has.

    IS_ROW: the row is one group (BLOCK_G is 1), and GROUP the columns of a step over it.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_g, offs_k = tl.arange(0, BLOCK_G), tl.arange(0, GROUP)
    x_row, residual_row = x_RH_ptr + row * stride_x, residual_RH_ptr + row * stride_residual
    squares = tl.zeros((BLOCK_G, GROUP), dtype=tl.float32)
    peaks = tl.zeros((BLOCK_G, GROUP), dtype=tl.float32)
    finite = tl.full((BLOCK_G, GROUP), 1, dtype=tl.int32)
    for start in range(0, H, BLOCK_G * GROUP):
        offs = start + offs_g[:, None] * GROUP + offs_k[None, :]
        inside = offs < H
        x = tl.load(x_row + offs, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + offs, mask=inside, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(residual_row + offs, x, mask=inside)
        wide = x.to(tl.float32)
        squares += wide * wide
        if IS_ROW:
            weight = tl.load(weight_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            a = tl.abs(wide * weight)
            peaks = tl.maximum(peaks, a)
            finite = finite & (a < float("inf")).to(tl.int32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / H + eps)
    scale = _scale_of(tl.max(peaks, axis=1) * inverse, tl.min(finite, axis=1), LARGEST)
    if HAS_RESIDUAL:
        # What one thread has stored another may read.
        tl.debug_barrier()
    for start in range(0, H, BLOCK_G * GROUP):
        group = start // GROUP + offs_g
        offs = start + offs_g[:, None] * GROUP + offs_k[None, :]
        inside = offs < H
        source = residual_row if HAS_RESIDUAL else x_row
        wide = tl.load(source + offs, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        y = wide * inverse * weight
        if KEEPS_ROWS:
            tl.store(y_RH_ptr + row * H + offs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
        if not IS_ROW:
            a = tl.abs(y)
            is_finite = tl.min((a < float("inf")).to(tl.int32), axis=1)
            scale = _scale_of(tl.max(a, axis=1), is_finite, LARGEST)
        scale_ptrs = scale_RG_ptr + row * num_groups + group
        # A row's one scale is stored in the first step.
        values = _rounded(
            y, scale, scale_ptrs, group < num_groups, LARGEST, IS_INTEGER, IS_UE8M0, IS_BITS
        )  # fmt: skip
        values = values.to(values_RH_ptr.dtype.element_ty)
        tl.store(values_RH_ptr + row * H + offs, values, mask=inside)
