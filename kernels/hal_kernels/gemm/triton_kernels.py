"""Matrix products in Triton: dense, and of two FP8 operands with block scales.

Suffixes of tensor names: M rows (tokens), N output features, K input features, G groups along K,
S splits of K. Weights are [N, K], rows are output features, as everywhere in halstack.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.epilogues import EPILOGUE_SILU_GATED, _finish, _store_result


@triton.jit
def _tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Programs in bands of GROUP_M row blocks: a band's weights stay in the second-level cache."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    band = pid // (GROUP_M * blocks_n)
    first = band * GROUP_M
    height = tl.minimum(blocks_m - first, GROUP_M)
    within = pid % (GROUP_M * blocks_n)
    return first + within % height, within // height


@triton.jit
def _gemm_kernel(
    x_MK_ptr, w_NK_ptr, bias_N_ptr, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, part_SMN_ptr,
    M, N, K, stride_xm, stride_wn, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr = False, EPILOGUE: tl.constexpr = 0,
    CLAMP: tl.constexpr = 0.0,
    HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """y = epilogue(x @ w.T + bias), accumulated in float32. N is the number of columns of y: a
    gated epilogue reads weight rows [0, N) as gate and [N, 2N) as up. With SPLIT_K > 1 each split
    writes its float32 part (both halves of a gated one), which `_split_k_kernel` then sums in a
    fixed order: the result does not depend on which program comes first.
    """
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    split = tl.program_id(1)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
    up_ptrs = w_NK_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(split, tl.cdiv(K, BLOCK_K), SPLIT_K):
        at_k = step * BLOCK_K + offs_k
        inside = at_k[None, :] < K
        x = tl.load(x_ptrs + at_k[None, :], mask=rows[:, None] & inside, other=0.0)
        w = tl.load(w_ptrs + at_k[None, :], mask=cols[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
        if EPILOGUE == EPILOGUE_SILU_GATED:
            w_up = tl.load(up_ptrs + at_k[None, :], mask=cols[:, None] & inside, other=0.0)
            up = tl.dot(x, tl.trans(w_up), up)
    if SPLIT_K == 1:
        y = _finish(acc, up, bias_N_ptr, offs_n, N, HAS_BIAS, EPILOGUE, CLAMP)
        _store_result(
            y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym,
            stride_rm, HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
        )  # fmt: skip
    else:
        halves: tl.constexpr = 2 if EPILOGUE == EPILOGUE_SILU_GATED else 1
        tile = rows[:, None] & cols[None, :]
        part = part_SMN_ptr + (split * halves * M + offs_m).to(tl.int64)[:, None] * N
        tl.store(part + offs_n[None, :], acc, mask=tile)
        if EPILOGUE == EPILOGUE_SILU_GATED:
            tl.store(part + tl.cast(M, tl.int64) * N + offs_n[None, :], up, mask=tile)


@triton.jit
def _split_k_kernel(
    part_SMN_ptr, bias_N_ptr, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr,
    M, N, stride_ym, stride_rm,
    BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr = False,
    EPILOGUE: tl.constexpr = 0, CLAMP: tl.constexpr = 0.0,
    HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """Sums the parts of a split product in the order of the splits, then the epilogue."""
    row = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = offs_n < N
    halves: tl.constexpr = 2 if EPILOGUE == EPILOGUE_SILU_GATED else 1
    acc = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    for split in range(SPLIT_K):
        part = part_SMN_ptr + (split * halves * M + row).to(tl.int64) * N + offs_n
        acc += tl.load(part, mask=cols, other=0.0)[None, :]
        if EPILOGUE == EPILOGUE_SILU_GATED:
            up += tl.load(part + tl.cast(M, tl.int64) * N, mask=cols, other=0.0)[None, :]
    y = _finish(acc, up, bias_N_ptr, offs_n, N, HAS_BIAS, EPILOGUE, CLAMP)
    offs_m = row + tl.arange(0, 1)
    _store_result(
        y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
    )  # fmt: skip


@triton.jit
def _gemm_fp8_block_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_NK_ptr, w_scale_ptr, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr,
    M, N, K, stride_xm, stride_xs, stride_wn, stride_ws, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_K: tl.constexpr, SCALE_N: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE: tl.constexpr = 0, CLAMP: tl.constexpr = 0.0,
    HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """y = epilogue((x * x_scale) @ (w * w_scale).T) for FP8 operands. x_scale: float32, one per row
    and GROUP_K columns; w_scale: float32 [rows of w / SCALE_N, K / GROUP_K]. Each group's product
    is scaled into the float32 accumulator, as the checkpoints' block quantisation means it
    (https://arxiv.org/abs/2412.19437, section 3.3). N as in `_gemm_kernel`.
    """
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, GROUP_K)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    xs_ptrs = x_scale_MG_ptr + offs_m.to(tl.int64) * stride_xs
    ws_ptrs = w_scale_ptr + (offs_n // SCALE_N).to(tl.int64) * stride_ws
    up_ptrs = w_NK_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    us_ptrs = w_scale_ptr + ((offs_n + N) // SCALE_N).to(tl.int64) * stride_ws
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(tl.cdiv(K, GROUP_K)):
        inside = (group * GROUP_K + offs_k)[None, :] < K
        x = tl.load(x_ptrs + group * GROUP_K, mask=rows[:, None] & inside, other=0.0)
        w = tl.load(w_ptrs + group * GROUP_K, mask=cols[:, None] & inside, other=0.0)
        x_scale = tl.load(xs_ptrs + group, mask=rows, other=0.0)
        w_scale = tl.load(ws_ptrs + group, mask=cols, other=0.0)
        acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
        if EPILOGUE == EPILOGUE_SILU_GATED:
            w_up = tl.load(up_ptrs + group * GROUP_K, mask=cols[:, None] & inside, other=0.0)
            u_scale = tl.load(us_ptrs + group, mask=cols, other=0.0)
            up += tl.dot(x, tl.trans(w_up)) * x_scale[:, None] * u_scale[None, :]
    y = _finish(acc, up, y_MN_ptr, offs_n, N, False, EPILOGUE, CLAMP)
    _store_result(
        y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
    )  # fmt: skip


@triton.jit
def _gemm_mxfp8_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_NK_ptr, w_scale_NG_ptr, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr,
    M, N, K, stride_xm, stride_xs, stride_wn, stride_ws, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SCALE_N: tl.constexpr, EPILOGUE: tl.constexpr = 0, CLAMP: tl.constexpr = 0.0,
    HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """y = epilogue((x * 2**(x_scale-127)) @ (w * 2**(w_scale-127)).T) with one ue8m0 scale per 32
    columns (OCP Microscaling v1.0), multiplied in by the matrix unit itself where it can. w_scale:
    [rows of w / SCALE_N, K / 32]. K is a multiple of 32. N as in `_gemm_kernel`.
    """
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_g = tl.arange(0, BLOCK_K // 32)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
    xs_ptrs = x_scale_MG_ptr + offs_m.to(tl.int64)[:, None] * stride_xs
    ws_ptrs = w_scale_NG_ptr + (offs_n // SCALE_N).to(tl.int64)[:, None] * stride_ws
    up_ptrs = w_NK_ptr + (offs_n + N).to(tl.int64)[:, None] * stride_wn
    us_ptrs = w_scale_NG_ptr + ((offs_n + N) // SCALE_N).to(tl.int64)[:, None] * stride_ws
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at_k = step * BLOCK_K + offs_k
        at_g = step * (BLOCK_K // 32) + offs_g
        in_k, in_g = at_k[None, :] < K, at_g[None, :] < K // 32
        x = tl.load(x_ptrs + at_k[None, :], mask=rows[:, None] & in_k, other=0.0)
        w = tl.load(w_ptrs + at_k[None, :], mask=cols[:, None] & in_k, other=0.0)
        x_scale = tl.load(xs_ptrs + at_g[None, :], mask=rows[:, None] & in_g, other=0)
        w_scale = tl.load(ws_ptrs + at_g[None, :], mask=cols[:, None] & in_g, other=0)
        acc = tl.dot_scaled(x, x_scale, "e4m3", tl.trans(w), w_scale, "e4m3", acc)
        if EPILOGUE == EPILOGUE_SILU_GATED:
            w_up = tl.load(up_ptrs + at_k[None, :], mask=cols[:, None] & in_k, other=0.0)
            u_scale = tl.load(us_ptrs + at_g[None, :], mask=cols[:, None] & in_g, other=0)
            up = tl.dot_scaled(x, x_scale, "e4m3", tl.trans(w_up), u_scale, "e4m3", up)
    y = _finish(acc, up, y_MN_ptr, offs_n, N, False, EPILOGUE, CLAMP)
    _store_result(
        y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
    )  # fmt: skip
