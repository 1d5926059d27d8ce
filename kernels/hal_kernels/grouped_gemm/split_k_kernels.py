"""Products per expert of few rows in Triton, in parts along K that are summed later.

Suffixes of tensor names: M rows sorted by expert, E experts, N output features, K input features,
G groups along K, S parts. The steps are those of the kernels for whole products, kind by kind.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.grouped_gemm.triton_kernels import (
    _activated,
    _expert_tile,
    _mxfp4_product,
    _power_of_two,
)
from hal_kernels.grouped_gemm.weight_only_kernels import _weight_only_product

DENSE = tl.constexpr(0)
FP8_BLOCK = tl.constexpr(1)  # both operands FP8, float32 scales
MXFP4 = tl.constexpr(2)  # FP8 rows and FP4 weights, a ue8m0 scale per 32 columns of either
WEIGHT_ONLY = tl.constexpr(3)  # rows as they are; FP8 blocks, or FP4 with IS_FP4


@triton.jit
def _add_step(
    acc, x, x_scale, w_tile_ptr, ws_rows, step, offs_n, cols, K, stride_wn,
    KIND: tl.constexpr, IS_FP4: tl.constexpr, IS_UE8M0: tl.constexpr, UNPACKS: tl.constexpr,
    IS_FNUZ: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T of one step. w_tile_ptr: of the tile's first row of w, ws_rows [BLOCK_N]: of
    the first scale of each of its rows."""
    if KIND == MXFP4:
        w_ptrs = w_tile_ptr + offs_n.to(tl.int64)[:, None] * stride_wn
        acc = _mxfp4_product(
            acc, x, x_scale, w_ptrs, ws_rows, step, cols, K, BLOCK_N, BLOCK_K, UNPACKS, IS_FNUZ
        )
    elif KIND == WEIGHT_ONLY:
        PACKED: tl.constexpr = 2 if IS_FP4 else 1  # weights in a byte
        offs_b = tl.arange(0, BLOCK_K // PACKED)
        at_b = step * (BLOCK_K // PACKED)
        w_mask = cols[:, None] & (offs_b[None, :] < K // PACKED - at_b)
        w_offs = offs_n[:, None] * stride_wn + offs_b[None, :]
        acc = _weight_only_product(
            acc, x, w_tile_ptr + at_b, w_offs, w_mask, ws_rows, step, cols, K,
            BLOCK_N, BLOCK_K, IS_FP4, IS_UE8M0,
        )  # fmt: skip
    else:
        offs_k = tl.arange(0, BLOCK_K)
        at = step * BLOCK_K
        inside = cols[:, None] & (offs_k[None, :] < K - at)
        w_offs = offs_n[:, None] * stride_wn + offs_k[None, :]
        w = tl.load(w_tile_ptr + at + w_offs, mask=inside, other=0.0)
        if KIND == FP8_BLOCK:
            w_scale = tl.load(ws_rows + step, mask=cols, other=0.0)
            acc += tl.dot(x, tl.trans(w)) * x_scale[:, None] * w_scale[None, :]
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def _grouped_gemm_split_k_kernel(
    x_MK_ptr, x_scale_MG_ptr, w_ENK_ptr, w_scale_ptr, part_SMN_ptr, offsets_E_ptr, M, N, K,
    stride_xm, stride_xs, stride_we, stride_wn, stride_wse, stride_wsn,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALE_N: tl.constexpr, KIND: tl.constexpr, IS_FP4: tl.constexpr,
    UNPACKS: tl.constexpr, IS_FNUZ: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Float32 parts of x @ w[expert].T, one a split of K, for `_grouped_split_sum_kernel`. Program
    (row tile, column tile, split). Of a gated product, whose weights have rows [0, N) for the gate
    and [N, 2N) for up, a split has two parts. A step of FP8 blocks is one group of columns; what
    has no scales has x in their place."""
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    IS_UE8M0: tl.constexpr = w_scale_ptr.dtype.element_ty == tl.uint8
    split, splits = tl.program_id(2), tl.num_programs(2)
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    xs_rows = x_scale_MG_ptr + (first.to(tl.int64) + offs_m) * stride_xs
    scales = w_scale_ptr + expert.to(tl.int64) * stride_wse
    ws_rows = scales + ((first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    # Rows of up begin at N, which need not be where a block of scales begins.
    us_rows = scales + ((N + first_n + offs_n) // SCALE_N).to(tl.int64) * stride_wsn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(split, tl.cdiv(K, BLOCK_K), splits):
        at = step * BLOCK_K
        inside = rows[:, None] & (offs_k[None, :] < K - at)
        x = tl.load(x_tile_ptr + at + x_offs, mask=inside, other=0.0)
        x_scale = 0
        if KIND == FP8_BLOCK:
            x_scale = tl.load(xs_rows + step, mask=rows, other=0.0)
        elif KIND == MXFP4:
            if BLOCK_K == 32:
                x_scale = _power_of_two(tl.load(xs_rows + step, mask=rows, other=0))
            else:
                at_g = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
                in_g = rows[:, None] & (at_g[None, :] < K // 32)
                x_scale = tl.load(xs_rows[:, None] + at_g[None, :], mask=in_g, other=0)
        acc = _add_step(
            acc, x, x_scale, w_tile_ptr, ws_rows, step, offs_n, cols, K, stride_wn,
            KIND, IS_FP4, IS_UE8M0, UNPACKS, IS_FNUZ, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if IS_GATED:
            up = _add_step(
                up, x, x_scale, up_tile_ptr, us_rows, step, offs_n, cols, K, stride_wn,
                KIND, IS_FP4, IS_UE8M0, UNPACKS, IS_FNUZ, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    halves: tl.constexpr = 2 if IS_GATED else 1
    tile = rows[:, None] & cols[None, :]
    at_row = tl.cast(split, tl.int64) * halves * M + first + offs_m
    part = part_SMN_ptr + at_row.to(tl.int64)[:, None] * N + first_n + offs_n[None, :]
    tl.store(part, acc, mask=tile)
    if IS_GATED:
        tl.store(part + tl.cast(M, tl.int64) * N, up, mask=tile)


@triton.jit
def _grouped_split_sum_kernel(
    part_SMN_ptr, y_MN_ptr, M, N, stride_ym,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, IS_GATED: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Sums the parts of split products in the order of the splits, then the gate. Program (row,
    columns)."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = offs_n < N
    halves: tl.constexpr = 2 if IS_GATED else 1
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    up = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in range(SPLITS):
        part = part_SMN_ptr + (split * halves * tl.cast(M, tl.int64) + row) * N + offs_n
        acc += tl.load(part, mask=cols, other=0.0)
        if IS_GATED:
            up += tl.load(part + tl.cast(M, tl.int64) * N, mask=cols, other=0.0)
    y = _activated(acc, up, IS_GATED, CLAMP)
    tl.store(y_MN_ptr + row * stride_ym + offs_n, y.to(y_MN_ptr.dtype.element_ty), mask=cols)
