"""Triton functions that read rows of a paged cache in the formats of `hal.ops.kv_formats`.

Values of eight and four bits are decoded with integer instructions: exact, and the same code on
architectures whose compiler back end knows no such type. A NaN code is read as a number: a group
that holds one has the scale NaN, which makes it NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a kernel is told about the format of its rows.
BF16 = tl.constexpr(0)
FP8 = tl.constexpr(1)
FP4 = tl.constexpr(2)


@triton.jit
def pages_of(table_W_ptr, entries, inside, PAGE: tl.constexpr):
    """Pages (int64) of these entries of one sequence."""
    return tl.load(table_W_ptr + entries // PAGE, mask=inside, other=0).to(tl.int64)


@triton.jit
def decode_e4m3(bits):
    """e4m3fn bits (uint8) as float32. The exponent's bias is 7, that of float16 is 15: shifted to
    float16's places, denormals included, the value is 2**-8 of what it means."""
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def decode_e2m1(codes):
    """e2m1 codes (0..15, int16) as float32, in the same way: the bias is 1."""
    half = ((codes & 0x8) << 12) | ((codes & 0x7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def decode_ue8m0(code):
    """ue8m0 codes (uint8) as float32: 0 is 2**-127, a denormal there, and 255 is NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def fnuz_of_e4m3(bits):
    """e4m3fn bits as e4m3fnuz, where they mean half: minus zero is NaN there and becomes zero."""
    plain = tl.where(bits == 0x80, 0, bits).to(tl.uint8)
    return plain.to(tl.float8e4b8, bitcast=True)
