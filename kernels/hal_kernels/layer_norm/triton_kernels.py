"""Layer norm in Triton: one row per program. Suffixes: R rows, H hidden size. Sums in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _layer_norm_kernel(
    x_RH_ptr, weight_H_ptr, bias_H_ptr, y_RH_ptr, stride_x, stride_y, H, eps,
    BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) * weight (+ bias). BLOCK_H: a power of two >= H."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    inside = offs < H
    x = tl.load(x_RH_ptr + row * stride_x + offs, mask=inside, other=0.0).to(tl.float32)
    # The row stays in registers: the variance is of centred values, which cancels nothing.
    centred = tl.where(inside, x - tl.sum(x, axis=0) / H, 0.0)
    variance = tl.sum(centred * centred, axis=0) / H
    y = centred * (1.0 / tl.sqrt(variance + eps))
    y *= tl.load(weight_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_RH_ptr + row * stride_y + offs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
