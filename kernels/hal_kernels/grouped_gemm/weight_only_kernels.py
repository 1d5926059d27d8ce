"""Products per expert in Triton whose weights alone are quantised: FP8 blocks, and MXFP4.

Suffixes of tensor names: M rows, E experts, N output features, K input features.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.grouped_gemm.triton_kernels import _activated, _expert_tile
from hal_kernels.kv_write.packed_rows import decode_e2m1, decode_e4m3, decode_ue8m0


@triton.jit
def _weight_only_product(
    acc, x, w_tile_ptr, w_offs, w_mask, ws_ptrs, step, cols, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_FP4: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """One step along K of x @ (w * scale).T, added to acc. ws_ptrs [BLOCK_N]: of the scale of the
    first column of each row of w.

    Powers of two are multiplied into the weight, which stays exact in bfloat16 and takes a step of
    several groups; a float32 scale is one of the whole step, and is multiplied into its sum."""
    raw = tl.load(w_tile_ptr + w_offs, mask=w_mask, other=0)
    if IS_FP4:
        codes = tl.join(raw & 0xF, raw >> 4).reshape(BLOCK_N, BLOCK_K)
        w = decode_e2m1(codes.to(tl.int16))
    else:
        w = decode_e4m3(raw)
    if IS_UE8M0:
        groups: tl.constexpr = BLOCK_K // 32
        at_g = step * groups + tl.arange(0, groups)
        inside = cols[:, None] & (at_g[None, :] < tl.cdiv(K, 32))
        code = tl.load(ws_ptrs[:, None] + at_g[None, :], mask=inside, other=127)
        apart = tl.reshape(w, (BLOCK_N, groups, 32)) * decode_ue8m0(code)[:, :, None]
        w = tl.reshape(apart, (BLOCK_N, BLOCK_K))
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    else:
        scale = tl.load(ws_ptrs + step * BLOCK_K // 128, mask=cols, other=0.0)
        acc += tl.dot(x, tl.trans(w.to(x.dtype))) * scale[None, :]
    return acc


@triton.jit
def _grouped_gemm_weight_only_kernel(
    x_MK_ptr, w_ENK_ptr, w_scale_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_we, stride_wn, stride_wse, stride_wsn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_N: tl.constexpr, IS_FP4: tl.constexpr, IS_GATED: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ (w[expert] * scale).T) on the 16-bit matrix unit, rows as they are. w: bits
    of e4m3fn (uint8 [E, rows, K]) that hold no NaN, or with IS_FP4 e2m1 codes, two in a byte, the
    even column in the low half. w_scale [E, rows / SCALE_N, groups along K]: ue8m0 codes (uint8) of
    32 columns, or float32 of 128. Gated weights as in `_grouped_gemm_kernel`."""
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    IS_UE8M0: tl.constexpr = w_scale_ptr.dtype.element_ty == tl.uint8
    PACKED: tl.constexpr = 2 if IS_FP4 else 1  # weights in a byte
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K // PACKED)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_n[:, None] * stride_wn + offs_b[None, :]
    scales = w_scale_ptr + expert.to(tl.int64) * stride_wse
    ws_ptrs = scales + ((first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    # Rows of up begin at N, which need not be where a block of scales begins.
    us_ptrs = scales + ((N + first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at, at_b = step * BLOCK_K, step * (BLOCK_K // PACKED)
        inside = rows[:, None] & (offs_k[None, :] < K - at)
        w_mask = cols[:, None] & (offs_b[None, :] < K // PACKED - at_b)
        x = tl.load(x_tile_ptr + at + x_offs, mask=inside, other=0.0)
        acc = _weight_only_product(
            acc, x, w_tile_ptr + at_b, w_offs, w_mask, ws_ptrs, step, cols, K,
            BLOCK_N, BLOCK_K, IS_FP4, IS_UE8M0,
        )  # fmt: skip
        if IS_GATED:
            up = _weight_only_product(
                up, x, up_tile_ptr + at_b, w_offs, w_mask, us_ptrs, step, cols, K,
                BLOCK_N, BLOCK_K, IS_FP4, IS_UE8M0,
            )  # fmt: skip
    y = _activated(acc, up, IS_GATED, CLAMP).to(y_MN_ptr.dtype.element_ty)
    y_tile_ptr = y_MN_ptr + first.to(tl.int64) * stride_ym + first_n
    y_offs = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile_ptr + y_offs, y, mask=rows[:, None] & cols[None, :])
