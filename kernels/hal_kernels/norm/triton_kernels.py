"""Root-mean-square norm in Triton, with residual add and int8 rounding: rows kept in registers, or
read twice where they do not fit.

Suffixes of tensor names: R rows, H hidden size. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded_to_int8(y, scale):
    # The largest value may round past 127: it is clamped to it.
    values = tl.minimum(tl.maximum(y / scale, -127.0), 127.0)
    # Half to even, as torch.round: adding and taking away 1.5 * 2**23 rounds a float32.
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _rms_norm_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, scale_R_ptr,
    stride_x, stride_residual, stride_y, R, H, eps,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """y = (x + residual) / rms * weight; the sum is written back to `residual`. BLOCK_R rows.

    IS_QUANTISED: y is rounded to int8, scale = amax / 127 (1 for a row of zeros). BLOCK_H: a power
    of two of at least H.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    offs_r, offs_h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    rows, columns = first + offs_r < R, (offs_h < H)[None, :]
    # A program of one row is one of a row that there is.
    inside = rows[:, None] & columns if BLOCK_R > 1 else columns
    x_ptrs = x_RH_ptr + first * stride_x + (offs_r[:, None] * stride_x + offs_h[None, :])
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual_ptrs = residual_RH_ptr + first * stride_residual
        residual_ptrs += offs_r[:, None] * stride_residual + offs_h[None, :]
        residual = tl.load(residual_ptrs, mask=inside, other=0.0)
        # Rounded to the activations' own dtype, as the layers of a model add.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptrs, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / H
    weight = tl.load(weight_H_ptr + offs_h[None, :], mask=columns, other=0.0).to(tl.float32)
    y = wide * (1.0 / tl.sqrt(mean + eps))[:, None] * weight
    if IS_QUANTISED:
        peak = tl.max(tl.abs(y), axis=1)
        scale = tl.where(peak > 0.0, peak / 127.0, 1.0)
        y = _rounded_to_int8(y, scale[:, None])
        tl.store(scale_R_ptr + first + offs_r, scale, mask=rows)
    y_ptrs = y_RH_ptr + first * stride_y + (offs_r[:, None] * stride_y + offs_h[None, :])
    tl.store(y_ptrs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_looped_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, scale_R_ptr,
    stride_x, stride_residual, stride_y, H, eps,
    BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """As `_rms_norm_kernel`, one row of any width, BLOCK_H columns at a time: first the sum of
    squares and the largest value, then the results, from the row that the cache still has."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    x_row, residual_row = x_RH_ptr + row * stride_x, residual_RH_ptr + row * stride_residual
    squares = tl.zeros((BLOCK_H,), dtype=tl.float32)
    peaks = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        at = start + offs
        inside = at < H
        x = tl.load(x_row + at, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + at, mask=inside, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(residual_row + at, x, mask=inside)
        wide = x.to(tl.float32)
        squares += wide * wide
        if IS_QUANTISED:
            weight = tl.load(weight_H_ptr + at, mask=inside, other=0.0).to(tl.float32)
            peaks = tl.maximum(peaks, tl.abs(wide * weight))
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / H + eps)
    scale = 1.0
    if IS_QUANTISED:
        peak = tl.max(peaks, axis=0) * inverse
        scale = tl.where(peak > 0.0, peak / 127.0, 1.0)
        tl.store(scale_R_ptr + row, scale)
    if HAS_RESIDUAL:
        # What one thread has stored another may read.
        tl.debug_barrier()
    for start in range(0, H, BLOCK_H):
        at = start + offs
        inside = at < H
        source = residual_row if HAS_RESIDUAL else x_row
        wide = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_H_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y = wide * inverse * weight
        if IS_QUANTISED:
            y = _rounded_to_int8(y, scale)
        y_ptrs = y_RH_ptr + row * stride_y + at
        tl.store(y_ptrs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
