"""Products per expert of two FP8 operands in Triton for matrix units without FP8.

Suffixes of tensor names: M rows, E experts, N output features, K input features, G groups along K.
Operands are decoded to float16, in steps of K that the registers hold: see
`hal_kernels.gemm.widened_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.widened_kernels import _half_of_e4m3
from hal_kernels.grouped_gemm.triton_kernels import _activated, _expert_tile


@triton.jit
def _grouped_gemm_fp8_widened_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_ENK_ptr, w_scale_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_xs, stride_we, stride_wn, stride_wse, stride_wsn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr, SCALE_N: tl.constexpr, IS_GATED: tl.constexpr,
    CLAMP: tl.constexpr,
):  # fmt: skip
    """As `_grouped_gemm_fp8_kernel` on e4m3fn bits (uint8) that hold no NaN, or hold it under a
    scale that is NaN. BLOCK_K divides GROUP_K: the steps of a group are summed in float32, and
    their sum is scaled into the accumulator."""
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_n[:, None] * stride_wn + offs_k[None, :]
    xs_ptrs = x_scale_MG_ptr + (first.to(tl.int64) + offs_m) * stride_xs
    scales = w_scale_ptr + expert.to(tl.int64) * stride_wse
    ws_ptrs = scales + ((first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    us_ptrs = scales + ((N + first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps: tl.constexpr = GROUP_K // BLOCK_K
    for step in range(tl.cdiv(K, GROUP_K) * steps):
        at = step * BLOCK_K
        inside = offs_k[None, :] < K - at
        x = _half_of_e4m3(tl.load(x_tile_ptr + at + x_offs, mask=rows[:, None] & inside, other=0))
        w = _half_of_e4m3(tl.load(w_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0))
        part = tl.dot(x, tl.trans(w), part)
        if IS_GATED:
            bits = tl.load(up_tile_ptr + at + w_offs, mask=cols[:, None] & inside, other=0)
            up_part = tl.dot(x, tl.trans(_half_of_e4m3(bits)), up_part)
        if step % steps == steps - 1:
            group = step // steps
            x_scale = tl.load(xs_ptrs + group, mask=rows, other=0.0)
            w_scale = tl.load(ws_ptrs + group, mask=cols, other=0.0)
            acc += part * x_scale[:, None] * w_scale[None, :]
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            if IS_GATED:
                u_scale = tl.load(us_ptrs + group, mask=cols, other=0.0)
                up += up_part * x_scale[:, None] * u_scale[None, :]
                up_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    y = _activated(acc, up, IS_GATED, CLAMP).to(y_MN_ptr.dtype.element_ty)
    y_tile_ptr = y_MN_ptr + first.to(tl.int64) * stride_ym + first_n
    y_offs = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile_ptr + y_offs, y, mask=rows[:, None] & cols[None, :])
