"""Rounding of activations to e4m3 in integers, in Triton, for where Triton does not convert to FP8.

Suffixes of tensor names as in `hal_kernels.quantize.triton_kernels`, whose rules these are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.quantize.triton_kernels import _inverse_of_ue8m0, _scale_of, _ue8m0_code


@triton.jit
def _bits_of_e4m3(y):
    """float32 of at most 448 as e4m3fn bits (int32): to nearest, ties to even; NaN is 0x7F."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the steps are 2**-9: 2**23 pushes what is less than one step out of the mantissa.
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude >= 0.015625, normal, small)
    return tl.where(y == y, code, 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def _quantize_codes_kernel(
    x_RK_ptr, y_RK_ptr, scale_RG_ptr, stride_x, stride_y, K, num_groups,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """As `_quantize_groups_kernel` to e4m3fn, stored as bits (uint8)."""
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offs_k < K
    x = tl.load(x_RK_ptr + row * stride_x + offs_k, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1)
    scale = _scale_of(tl.max(tl.abs(x), axis=1), is_finite, 448.0)
    groups = offs_g < num_groups
    scale_ptrs = scale_RG_ptr + row * num_groups + offs_g
    if IS_UE8M0:
        code = _ue8m0_code(scale)
        tl.store(scale_ptrs, code.to(tl.uint8), mask=groups)
        y = x * _inverse_of_ue8m0(code)[:, None]
    else:
        tl.store(scale_ptrs, scale, mask=groups)
        y = x / scale[:, None]
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -448.0), 448.0), y)
    tl.store(y_RK_ptr + row * stride_y + offs_k, _bits_of_e4m3(y).to(tl.uint8), mask=inside)
