"""Products of few rows with a quantised weight in Triton, in parts along K that are summed later.

Suffixes of tensor names: M rows (tokens), N output features, K input features, G groups along K,
S parts. The steps are those of the kernels for whole products, format by format.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.weight_only_kernels import FP8_WEIGHT, _add_widened

# Kinds before those of `weight_only_kernels`.
FP8_BLOCK = tl.constexpr(0)  # both operands FP8, float32 scales
MXFP8 = tl.constexpr(1)  # both operands FP8, ue8m0 scales that the matrix unit multiplies in


@triton.jit
def _add_step(
    acc, x, x_scale, w_rows, scale_rows, minimum_rows, step, cols, K,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T of one step. *_rows: of the first column of each row of w [BLOCK_N]."""
    if KIND >= FP8_WEIGHT:
        acc = _add_widened(
            acc, x, w_rows, scale_rows, minimum_rows, step, cols, K, KIND, GROUP_K, HAS_MINIMUM,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        at_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = cols[:, None] & (at_k[None, :] < K)
        w = tl.load(w_rows[:, None] + at_k[None, :], mask=inside, other=0.0)
        if KIND == MXFP8:
            at_g = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
            in_g = cols[:, None] & (at_g[None, :] < K // 32)
            w_scale = tl.load(scale_rows[:, None] + at_g[None, :], mask=in_g, other=0)
            acc = tl.dot_scaled(x, x_scale, "e4m3", tl.trans(w), w_scale, "e4m3", acc)
        else:
            w_scale = tl.load(scale_rows + step, mask=cols, other=0.0)
            acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
    return acc


@triton.jit
def _gemm_split_k_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_ptr, w_scale_ptr, minimum_ptr, part_SMN_ptr,
    M, N, K, stride_xm, stride_xs, stride_wn, stride_ws,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_K: tl.constexpr,
    SCALE_N: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUM: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Float32 parts of x @ (w * scale).T, one a split of K (program axis 1), for `_split_k_kernel`.
    At most BLOCK_M rows. Of a gated product, whose weight has rows [0, N) for the gate and [N, 2N)
    for up, a split has two parts. A step of FP8 blocks is one group of GROUP_K columns."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    xs_rows = x_scale_MG_ptr + offs_m.to(tl.int64) * stride_xs
    w_rows = w_ptr + offs_n.to(tl.int64) * stride_wn
    scale_rows = w_scale_ptr + (offs_n // SCALE_N).to(tl.int64) * stride_ws
    minimum_rows = minimum_ptr + (offs_n // SCALE_N).to(tl.int64) * stride_ws
    up_rows = w_ptr + (offs_n + N).to(tl.int64) * stride_wn
    up_scale_rows = w_scale_ptr + ((offs_n + N) // SCALE_N).to(tl.int64) * stride_ws
    up_minimum_rows = minimum_ptr + ((offs_n + N) // SCALE_N).to(tl.int64) * stride_ws
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(split, tl.cdiv(K, BLOCK_K), splits):
        at_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = rows[:, None] & (at_k[None, :] < K)
        x = tl.load(x_ptrs + at_k[None, :], mask=inside, other=0.0)
        x_scale = 0
        if KIND == FP8_BLOCK:
            x_scale = tl.load(xs_rows + step, mask=rows, other=0.0)
        elif KIND == MXFP8:
            at_g = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
            in_g = rows[:, None] & (at_g[None, :] < K // 32)
            x_scale = tl.load(xs_rows[:, None] + at_g[None, :], mask=in_g, other=0)
        acc = _add_step(
            acc, x, x_scale, w_rows, scale_rows, minimum_rows, step, cols, K,
            KIND, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if IS_GATED:
            up = _add_step(
                up, x, x_scale, up_rows, up_scale_rows, up_minimum_rows, step, cols, K,
                KIND, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    if GROUP_K == 0:
        acc *= tl.load(scale_rows, mask=cols, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up *= tl.load(up_scale_rows, mask=cols, other=0.0).to(tl.float32)[None, :]
    halves: tl.constexpr = 2 if IS_GATED else 1
    tile = rows[:, None] & cols[None, :]
    part = part_SMN_ptr + (split * halves * M + offs_m).to(tl.int64)[:, None] * N
    tl.store(part + offs_n[None, :], acc, mask=tile)
    if IS_GATED:
        tl.store(part + tl.cast(M, tl.int64) * N + offs_n[None, :], up, mask=tile)
