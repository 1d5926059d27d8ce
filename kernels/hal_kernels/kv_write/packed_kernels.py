"""Rows rounded to eight bits and written into a paged cache, in Triton.

The formats are those of `hal.ops.kv_formats`, the rounding is that of `hal.ops.low_precision` to
the bit, with integer instructions: the same code on architectures that convert no such type.
Suffixes of tensor names: T tokens, D values of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)


@triton.jit
def encode_e4m3(x):
    """float32 as e4m3fn bits (uint8): to nearest, ties to even, saturated; NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), _LARGEST)
    wide = size.to(tl.int32, bitcast=True)
    # Three bits of the mantissa stay; the exponent's bias falls from 127 to 7.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the steps are of 2**-9, the last place of a float32 at 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code | ((bits >> 24) & 0x80), 0x7F)
    return code.to(tl.uint8)


@triton.jit
def encode_ue8m0(scale):
    """float32 scales as exponent codes (int32), rounded up to a power of two; NaN is 255."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = tl.minimum(exponent + (mantissa > 0).to(tl.int32), 254)
    code = tl.where((exponent == 0) & (mantissa <= 0x400000), 0, code)
    return tl.where(scale == scale, code, 255)


@triton.jit
def store_rounded(
    x, values_ptr, scales_ptr, offs, inside, offs_g,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, SCALES: tl.constexpr,
    IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Groups of a row, float32 [BLOCK_G, GROUP], rounded to where its values and scales begin."""
    size = tl.abs(x)
    peak = tl.max(size, axis=1)
    is_finite = tl.min((size < float("inf")).to(tl.int32), axis=1) > 0
    scale = tl.where(peak > 0.0, tl.div_rn(peak, tl.full((BLOCK_G,), _LARGEST, tl.float32)), 1.0)
    scale = tl.where(is_finite, scale, float("nan"))
    if IS_UE8M0:
        code = encode_ue8m0(scale)
        bits = tl.where(code == 0, 0x400000, code << 23)
        scale = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        code = tl.where(offs_g < GROUPS, code, 0).to(tl.uint8)
        tl.store(scales_ptr + offs_g, code, mask=offs_g < SCALES)
    else:
        tl.store(scales_ptr + offs_g, scale, mask=offs_g < SCALES)
    values = encode_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], (BLOCK_G, GROUP))))
    tl.store(values_ptr + offs, values, mask=inside)


@triton.jit
def _kv_write_packed_kernel(
    x_TD_ptr, values_ptr, scales_ptr, tails_ptr, slots_T_ptr,
    stride_x, stride_page, stride_row, stride_scale_page, stride_scale_row, scale_start,
    stride_tail_page, stride_tail_row, tail_start,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, SCALES: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (token). GROUPS of GROUP values with a scale each, then PLAIN values in bfloat16.
    SCALES: with the padding, which is zeros. Offsets are in elements of each pointer."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T_ptr + token).to(tl.int64)
    page, row = slot // PAGE, slot % PAGE
    offs_g, offs_k = tl.arange(0, BLOCK_G), tl.arange(0, GROUP)
    offs = offs_g[:, None] * GROUP + offs_k[None, :]
    inside = (offs_g < GROUPS)[:, None] & (offs_k >= 0)[None, :]
    x = tl.load(x_TD_ptr + token * stride_x + offs, mask=inside, other=0.0).to(tl.float32)
    store_rounded(
        x, values_ptr + page * stride_page + row * stride_row,
        scales_ptr + page * stride_scale_page + row * stride_scale_row + scale_start,
        offs, inside, offs_g, GROUPS, GROUP, BLOCK_G, SCALES, IS_UE8M0,
    )  # fmt: skip
    if PLAIN > 0:
        offs_p = tl.arange(0, BLOCK_P)
        tail = x_TD_ptr + token * stride_x + GROUPS * GROUP + offs_p
        plain = tl.load(tail, mask=offs_p < PLAIN, other=0.0).to(tl.float32)
        tail_ptrs = tails_ptr + page * stride_tail_page + row * stride_tail_row + tail_start
        tl.store(tail_ptrs + offs_p, plain.to(tl.bfloat16), mask=offs_p < PLAIN)
