"""Rounding of rows with one scale that are too wide for registers, in Triton.

Suffixes of tensor names as in `hal_kernels.quantize.triton_kernels`, whose rules these are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.quantize.code_kernels import _bits_of_e4m3
from hal_kernels.quantize.triton_kernels import _scale_of


@triton.jit
def _quantize_row_looped_kernel(
    x_RK_ptr, y_RK_ptr, scale_R_ptr, stride_x, stride_y, K,
    BLOCK_K: tl.constexpr, LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr, IS_BITS: tl.constexpr,
):  # fmt: skip
    """One row, BLOCK_K columns at a time: first its largest value, then the results, from the row
    that the cache still has. IS_BITS: e4m3fn is stored as bits (uint8)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    x_row, y_row = x_RK_ptr + row * stride_x, y_RK_ptr + row * stride_y
    peaks = tl.zeros((BLOCK_K,), dtype=tl.float32)
    finite = tl.full((BLOCK_K,), 1, dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        at = start + offs
        a = tl.abs(tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32))
        peaks = tl.maximum(peaks, a)
        finite = finite & (a < float("inf")).to(tl.int32)
    scale = _scale_of(tl.max(peaks, axis=0), tl.min(finite, axis=0), LARGEST)
    tl.store(scale_R_ptr + row, scale)
    for start in range(0, K, BLOCK_K):
        at = start + offs
        y = tl.load(x_row + at, mask=at < K, other=0.0).to(tl.float32) / scale
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), y)
        if IS_INTEGER:
            # Half to even: 1.5 * 2**23 rounds a float32. An integer has no NaN: it is 0.
            y = tl.where(y == y, (y + 12582912.0) - 12582912.0, 0.0)
        if IS_BITS:
            tl.store(y_row + at, _bits_of_e4m3(y).to(tl.uint8), mask=at < K)
        else:
            tl.store(y_row + at, y.to(y_RK_ptr.dtype.element_ty), mask=at < K)
