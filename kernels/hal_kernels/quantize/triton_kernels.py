"""Rounding of activations in groups along a row, in Triton.

Suffixes of tensor names: R rows, K width, G groups of a row, B bytes of a row of four-bit values.
The rules are those of `hal.ops.low_precision`: scale = amax / largest, 1 for a group of zeros, NaN
for a group with a value that is not finite; as ue8m0 the next power of two that does not saturate,
as e4m3 to nearest and not 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale_of(peak, is_finite, LARGEST: tl.constexpr):
    # Rounded: a quotient one bit too large would double the power of two.
    scale = tl.where(peak > 0.0, tl.div_rn(peak, LARGEST), 1.0)
    return tl.where(is_finite > 0, scale, float("nan"))


@triton.jit
def _ue8m0_code(scale):
    """The exponent, one more if there is any mantissa: rounded up to a power of two. 255 is NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) > 0).to(tl.int32)
    # Below 2**-126 a float32 is denormal; 2**-127 is the least power of two that a code has.
    code = tl.minimum(tl.where(bits <= 0x400000, 0, code), 254)
    return tl.where(scale == scale, code, 255)


@triton.jit
def _inverse_of_ue8m0(code):
    """2**(127 - code), by which a product is the exact quotient. NaN for 255."""
    bits = tl.where(code == 254, 0x400000, (254 - code) << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_code(x):
    """Positive float32, or NaN, as e4m3: to nearest, ties to even, from 2**-9 to 448. In integers,
    so that it is the same where the instruction set has no FP8."""
    x = tl.minimum(tl.maximum(x, 0.001953125), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the steps are 2**-9: 2**23 pushes what is less than one step out of the mantissa.
    small = (x * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    return tl.where(x >= 0.015625, normal, small)


@triton.jit
def _float_of_e4m3(code):
    normal = ((code & 0x7F) + 960) << 20
    small = (code & 0x7).to(tl.float32) * 0.001953125
    return tl.where(code >= 8, normal.to(tl.float32, bitcast=True), small)


@triton.jit
def _e2m1_code(x):
    """float32 as e2m1 in 0..15; the middle between neighbours goes to the even code."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)


@triton.jit
def _quantize_fp4_kernel(
    x_RK_ptr, y_RB_ptr, scale_RG_ptr, stride_x, K, num_groups,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """As `_quantize_groups_kernel` to e2m1, two columns in a byte, the even one in the low half;
    scales are ue8m0 or e4m3 codes."""
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_RK_ptr + row * stride_x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    a = tl.abs(x)
    is_finite = tl.min((a < float("inf")).to(tl.int32), axis=1)
    scale = _scale_of(tl.max(a, axis=1), is_finite, 6.0)
    if IS_UE8M0:
        code = _ue8m0_code(scale)
        values = x * _inverse_of_ue8m0(code)[:, None]
    else:
        code = tl.where(scale == scale, _e4m3_code(scale), 0x7F)
        values = tl.div_rn(x, tl.broadcast_to(_float_of_e4m3(code)[:, None], (BLOCK_G, GROUP)))
    # Of a group that has no scale the codes mean nothing: they are zero.
    codes = tl.where(is_finite[:, None] > 0, _e2m1_code(values), 0)
    even, odd = tl.split(tl.reshape(codes, (BLOCK_G, GROUP // 2, 2)))
    offs_b = offs_g[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
    y = (even | (odd << 4)).to(tl.uint8)
    tl.store(y_RB_ptr + row * (K // 2) + offs_b, y, mask=offs_b < K // 2)
    tl.store(scale_RG_ptr + row * num_groups + offs_g, code.to(tl.uint8), mask=offs_g < num_groups)


@triton.jit
def _quantize_groups_kernel(
    x_RK_ptr, y_RK_ptr, scale_RG_ptr, stride_x, stride_y, K, num_groups,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, LARGEST: tl.constexpr,
    IS_INTEGER: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (row, block of BLOCK_G groups of GROUP columns). GROUP is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offs_k < K
    x = tl.load(x_RK_ptr + row * stride_x + offs_k, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1)
    scale = _scale_of(tl.max(tl.abs(x), axis=1), is_finite, LARGEST)
    groups = offs_g < num_groups
    scale_ptrs = scale_RG_ptr + row * num_groups + offs_g
    if IS_UE8M0:
        code = _ue8m0_code(scale)
        tl.store(scale_ptrs, code.to(tl.uint8), mask=groups)
        y = x * _inverse_of_ue8m0(code)[:, None]
    else:
        tl.store(scale_ptrs, scale, mask=groups)
        y = x / scale[:, None]
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -LARGEST), LARGEST), y)
    if IS_INTEGER:
        # Half to even: 1.5 * 2**23 rounds a float32. An integer has no NaN: it is 0.
        y = tl.where(y == y, (y + 12582912.0) - 12582912.0, 0.0)
    tl.store(y_RK_ptr + row * stride_y + offs_k, y.to(y_RK_ptr.dtype.element_ty), mask=inside)
