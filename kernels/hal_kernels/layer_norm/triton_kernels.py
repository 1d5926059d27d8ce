"""Layer norm in Triton: rows kept in registers, or read three times where they do not fit.

Suffixes of tensor names: R rows, H hidden size. Sums are in float32, the variance is of centred
values, which cancels nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _layer_norm_kernel(
    x_RH_ptr, weight_H_ptr, bias_H_ptr, y_RH_ptr, stride_x, stride_y, R, H, eps,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) * weight (+ bias) of BLOCK_R rows. BLOCK_H: a power of
    two of at least H."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    offs_r, offs_h = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    columns = (offs_h < H)[None, :]
    # A program of one row is one of a row that there is.
    inside = (first + offs_r < R)[:, None] & columns if BLOCK_R > 1 else columns
    x_ptrs = x_RH_ptr + first * stride_x + (offs_r[:, None] * stride_x + offs_h[None, :])
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - (tl.sum(x, axis=1) / H)[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / H
    y = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    y *= tl.load(weight_H_ptr + offs_h[None, :], mask=columns, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_H_ptr + offs_h[None, :], mask=columns, other=0.0).to(tl.float32)
    y_ptrs = y_RH_ptr + first * stride_y + (offs_r[:, None] * stride_y + offs_h[None, :])
    tl.store(y_ptrs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_looped_kernel(
    x_RH_ptr, weight_H_ptr, bias_H_ptr, y_RH_ptr, stride_x, stride_y, H, eps,
    BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """As `_layer_norm_kernel`, one row of any width, BLOCK_H columns at a time: its mean, its
    variance and the results one after the other, from the row that the cache still has."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    x_row = x_RH_ptr + row * stride_x
    sums = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        at = start + offs
        sums += tl.load(x_row + at, mask=at < H, other=0.0).to(tl.float32)
    mean = tl.sum(sums, axis=0) / H
    squares = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        at = start + offs
        x = tl.load(x_row + at, mask=at < H, other=0.0).to(tl.float32)
        centred = tl.where(at < H, x - mean, 0.0)
        squares += centred * centred
    inverse = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / H + eps)
    for start in range(0, H, BLOCK_H):
        at = start + offs
        inside = at < H
        y = (tl.load(x_row + at, mask=inside, other=0.0).to(tl.float32) - mean) * inverse
        y *= tl.load(weight_H_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_H_ptr + at, mask=inside, other=0.0).to(tl.float32)
        y_ptrs = y_RH_ptr + row * stride_y + at
        tl.store(y_ptrs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
