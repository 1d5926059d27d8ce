"""Root-mean-square norm in Triton: one row per program, with residual add and rounding in the pass.

Suffixes of tensor names: R rows, H hidden size, G groups of a row. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_RH_ptr, residual_RH_ptr, weight_H_ptr, y_RH_ptr, scale_RG_ptr,
    stride_x, stride_residual, stride_y, H, eps,
    BLOCK_H: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUANTIZE_GROUP: tl.constexpr,
    LARGEST: tl.constexpr, IS_INTEGER: tl.constexpr,
):  # fmt: skip
    """y = (x + residual) / rms * weight; the sum is written back to `residual`.

    QUANTIZE_GROUP > 0: y is rounded in groups of so many columns, scale = amax / LARGEST (1 for a
    group of zeros); LARGEST is the format's largest value (448 for e4m3fn, 127 for int8). BLOCK_H
    is a power of two of at least H, a multiple of QUANTIZE_GROUP.
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
    if QUANTIZE_GROUP == 0:
        tl.store(y_RH_ptr + row * stride_y + offs, y.to(y_RH_ptr.dtype.element_ty), mask=inside)
    else:
        groups: tl.constexpr = BLOCK_H // QUANTIZE_GROUP
        grouped = tl.reshape(y, (groups, QUANTIZE_GROUP))
        peak = tl.max(tl.abs(grouped), axis=1)
        scale = tl.where(peak > 0.0, peak / LARGEST, 1.0)
        # The largest value may round past the format's largest: it is clamped to it.
        values = tl.reshape(grouped / scale[:, None], (BLOCK_H,))
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        if IS_INTEGER:
            # Half to even, as torch.round: adding and taking away 1.5 * 2**23 rounds a float32.
            values = (values + 12582912.0) - 12582912.0
        tl.store(
            y_RH_ptr + row * stride_y + offs, values.to(y_RH_ptr.dtype.element_ty), mask=inside
        )
        offs_g = tl.arange(0, groups)
        row_groups = tl.cdiv(H, QUANTIZE_GROUP)
        tl.store(scale_RG_ptr + row * row_groups + offs_g, scale, mask=offs_g < row_groups)
