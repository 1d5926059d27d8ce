"""Rounds rows to MXFP8 in Triton and keeps the values in 16 bits, for matrix units without FP8.

Suffixes of tensor names: R rows, K width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_ue8m0
from hal_kernels.quantize.code_kernels import _bits_of_e4m3
from hal_kernels.quantize.triton_kernels import (
    _float_of_e4m3,
    _inverse_of_ue8m0,
    _scale_of,
    _ue8m0_code,
)


@triton.jit
def _round_rows_kernel(
    x_RK_ptr, y_RK_ptr, stride_x, stride_y, K, GROUP: tl.constexpr, BLOCK_G: tl.constexpr
):  # fmt: skip
    """y = what e4m3 values under a ue8m0 scale per GROUP columns keep of x, by the rules of the op
    `quantize`. Each is a value of bfloat16, which has the exponents and more digits. Program (row,
    block of BLOCK_G groups)."""
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_k = offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = offs_k < K
    x = tl.load(x_RK_ptr + row * stride_x + offs_k, mask=inside, other=0.0).to(tl.float32)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=1)
    code = _ue8m0_code(_scale_of(tl.max(tl.abs(x), axis=1), is_finite, 448.0))
    y = x * _inverse_of_ue8m0(code)[:, None]
    bits = _bits_of_e4m3(tl.where(y == y, tl.minimum(tl.maximum(y, -448.0), 448.0), y))
    size = _float_of_e4m3(bits & 0x7F)
    kept = tl.where(bits >= 0x80, -size, size) * decode_ue8m0(code)[:, None]
    tl.store(y_RK_ptr + row * stride_y + offs_k, kept.to(y_RK_ptr.dtype.element_ty), mask=inside)
