"""Rows rounded to four bits and written into a paged cache, in Triton.

The formats are those of `hal.ops.kv_formats`, the rounding is that of `hal.ops.low_precision` to
the bit. Suffixes of tensor names: T tokens, D values of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_kernels import encode_e4m3, encode_ue8m0
from hal_kernels.kv_write.packed_rows import decode_e4m3, decode_ue8m0

_LARGEST = tl.constexpr(6.0)
_SMALLEST_SCALE = tl.constexpr(0.001953125)  # 2**-9, of e4m3


@triton.jit
def encode_e2m1(x):
    """float32 as e2m1 codes (int32): to nearest, of two neighbours the even one; saturated."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 0x8)


@triton.jit
def store_rounded_to_fp4(
    x, values_ptr, scales_ptr, GROUPS: tl.constexpr, GROUP: tl.constexpr, IS_UE8M0: tl.constexpr
):
    """Groups of a row, float32 [GROUPS, GROUP], rounded to where its values and scales begin. Two
    values are in a byte, the even column in the low half."""
    even, odd = tl.split(tl.reshape(x, (GROUPS, GROUP // 2, 2)))
    peak = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    is_number = (tl.abs(even) < float("inf")) & (tl.abs(odd) < float("inf"))
    is_finite = tl.min(is_number.to(tl.int32), axis=1) > 0
    scale = tl.where(peak > 0.0, tl.div_rn(peak, tl.full((GROUPS,), _LARGEST, tl.float32)), 1.0)
    scale = tl.where(is_finite, scale, float("nan"))
    if IS_UE8M0:
        code = encode_ue8m0(scale).to(tl.uint8)
        scale = decode_ue8m0(code)
    else:
        # Not 0, which would divide by it; a NaN is not smaller than anything.
        code = encode_e4m3(tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale))
        scale = tl.where(code == 0x7F, float("nan"), decode_e4m3(code))
    wide = tl.broadcast_to(scale[:, None], (GROUPS, GROUP // 2))
    low, high = encode_e2m1(tl.div_rn(even, wide)), encode_e2m1(tl.div_rn(odd, wide))
    offs_g, offs_b = tl.arange(0, GROUPS), tl.arange(0, GROUP // 2)
    at = offs_g[:, None] * (GROUP // 2) + offs_b[None, :]
    tl.store(values_ptr + at, (low | (high << 4)).to(tl.uint8))
    tl.store(scales_ptr + offs_g, code)


@triton.jit
def _kv_write_fp4_kernel(
    x_TD_ptr, cache_ptr, slots_T_ptr, stride_x, stride_page, scale_start,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (token). GROUPS of GROUP values with a scale each; the scales of a page begin at
    scale_start."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_T_ptr + token).to(tl.int64)
    page, row = slot // PAGE, slot % PAGE
    offs = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_TD_ptr + token * stride_x + offs).to(tl.float32)
    page_ptr = cache_ptr + page * stride_page
    store_rounded_to_fp4(
        x, page_ptr + row * (GROUPS * GROUP // 2), page_ptr + scale_start + row * GROUPS,
        GROUPS, GROUP, IS_UE8M0,
    )  # fmt: skip
