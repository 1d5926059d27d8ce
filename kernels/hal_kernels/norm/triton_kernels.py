"""Root-mean-square norm in Triton: one row per program, with residual add and int8 rounding.

Suffixes of tensor names: R rows, H hidden size. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, scale_R_ptr,
    stride_x, stride_residual, stride_y, H, eps,
    BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_QUANTISED: tl.constexpr,
):  # fmt: skip
    """y = (x + residual) / rms * weight; the sum is written back to `residual`.

    IS_QUANTISED: y is rounded to int8, scale = amax / 127 (1 for a row of zeros). BLOCK_H: a power
    of two of at least H.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    inside = offs < H
    x = tl.load(x_RH_ptr + row * stride_x + offs, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_RH_ptr + row * stride_residual + offs, mask=inside, other=0.0)
        # Rounded to the activations' own dtype, as the layers of a model add.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_RH_ptr + row * stride_residual + offs, x, mask=inside)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=0) / H
    weight = tl.load(weight_H_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    y = wide * (1.0 / tl.sqrt(mean + eps)) * weight
    if IS_QUANTISED:
        peak = tl.max(tl.abs(y), axis=0)
        scale = tl.where(peak > 0.0, peak / 127.0, 1.0)
        # The largest value may round past 127: it is clamped to it.
        values = tl.minimum(tl.maximum(y / scale, -127.0), 127.0)
        # Half to even, as torch.round: adding and taking away 1.5 * 2**23 rounds a float32.
        y = (values + 12582912.0) - 12582912.0
        tl.store(scale_R_ptr + row, scale)
    tl.store(y_RH_ptr + row * stride_y + offs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
