"""Products of two FP8 operands in Triton for matrix units without FP8: decoded here to float16.

Suffixes of tensor names: M rows (tokens), N output features, K input features, G groups along K.
The compiler would widen FP8 operands by itself, in ten times the code, and spill on RDNA 3: so
operands come as bits (uint8) and are decoded by three instructions a value, and a step along K is
shorter than a group that shares a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.epilogues import EPILOGUE_SILU_GATED, _finish, _store_result
from hal_kernels.gemm.triton_kernels import _tile_of


@triton.jit
def _half_of_e4m3(bits):
    """e4m3fn bits (uint8) as float16, which holds each of their values. Shifted to float16's places
    a value is 2**-8 of what it means, denormals included; multiplied by 256 it is normal there, so
    that matrix units that flush denormals (gfx90a) see none. A NaN code is read as a number."""
    wide = bits.to(tl.int16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _gemm_fp8_widened_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_NK_ptr, w_scale_ptr, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr,
    M, N, K, stride_xm, stride_xs, stride_wn, stride_ws, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr,
    SCALE_N: tl.constexpr, GROUP_M: tl.constexpr, EPILOGUE: tl.constexpr = 0,
    CLAMP: tl.constexpr = 0.0, HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """As `_gemm_fp8_block_kernel` on e4m3fn bits that hold no NaN, or hold it under a scale that is
    NaN, as the op `quantize` rounds. BLOCK_K divides GROUP_K: the steps of a group are summed in
    float32, and their sum is scaled into the accumulator, rounded as one step of a group would be.
    """
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    xs_ptrs = x_scale_MG_ptr + offs_m.to(tl.int64) * stride_xs
    ws_ptrs = w_scale_ptr + (offs_n // SCALE_N).to(tl.int64) * stride_ws
    up_ptrs = w_NK_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    us_ptrs = w_scale_ptr + ((offs_n + N) // SCALE_N).to(tl.int64) * stride_ws
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    steps: tl.constexpr = GROUP_K // BLOCK_K
    for step in range(tl.cdiv(K, GROUP_K) * steps):
        at = step * BLOCK_K
        inside = offs_k[None, :] < K - at
        x = _half_of_e4m3(tl.load(x_ptrs + at, mask=rows[:, None] & inside, other=0))
        w = _half_of_e4m3(tl.load(w_ptrs + at, mask=cols[:, None] & inside, other=0))
        part = tl.dot(x, tl.trans(w), part)
        if EPILOGUE == EPILOGUE_SILU_GATED:
            w_up = _half_of_e4m3(tl.load(up_ptrs + at, mask=cols[:, None] & inside, other=0))
            up_part = tl.dot(x, tl.trans(w_up), up_part)
        if step % steps == steps - 1:
            group = step // steps
            x_scale = tl.load(xs_ptrs + group, mask=rows, other=0.0)
            w_scale = tl.load(ws_ptrs + group, mask=cols, other=0.0)
            acc += part * x_scale[:, None] * w_scale[None, :]
            part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            if EPILOGUE == EPILOGUE_SILU_GATED:
                u_scale = tl.load(us_ptrs + group, mask=cols, other=0.0)
                up += up_part * x_scale[:, None] * u_scale[None, :]
                up_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    y = _finish(acc, up, y_MN_ptr, offs_n, N, False, EPILOGUE, CLAMP)
    _store_result(
        y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
    )  # fmt: skip
