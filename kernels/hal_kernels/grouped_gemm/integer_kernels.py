"""Products per expert in Triton whose weights are integers: int8 and int4.

Suffixes of tensor names: M rows, E experts, N output features, K input features, G groups along K.
Weights are widened in registers and meet the rows as they are, on the 16-bit matrix unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.grouped_gemm.triton_kernels import _activated, _expert_tile


@triton.jit
def _integer_product(
    acc, x, w_tile_ptr, w_offs, scale_rows, minimum_rows, step, cols, K,
    BITS: tl.constexpr, GROUP_K: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T of one step; without the scale where that is one of a row (GROUP_K 0). *_rows
    [BLOCK_N]: of the first group of each row of w. Of a group a scale is loaded once."""
    PACKED: tl.constexpr = 8 // BITS  # weights in a byte
    bytes_of_step: tl.constexpr = BLOCK_K // PACKED
    at_b = step * bytes_of_step + tl.arange(0, bytes_of_step)
    inside = cols[:, None] & (at_b[None, :] < K // PACKED)
    raw = tl.load(w_tile_ptr + step * bytes_of_step + w_offs, mask=inside, other=0)
    if BITS == 4:
        w = tl.join(raw & 0xF, raw >> 4).reshape(BLOCK_N, BLOCK_K).to(tl.float32)
        if not HAS_MINIMUM:
            w -= 8.0
    else:
        w = raw.to(tl.float32)
    if GROUP_K > 0:
        groups: tl.constexpr = BLOCK_K // GROUP_K
        at_g = step * groups + tl.arange(0, groups)
        in_g = cols[:, None] & (at_g[None, :] < tl.cdiv(K, GROUP_K))
        scale = tl.load(scale_rows[:, None] + at_g[None, :], mask=in_g, other=0.0)
        apart = tl.reshape(w, (BLOCK_N, groups, GROUP_K)) * scale.to(tl.float32)[:, :, None]
        if HAS_MINIMUM:
            least = tl.load(minimum_rows[:, None] + at_g[None, :], mask=in_g, other=0.0)
            apart += least.to(tl.float32)[:, :, None]
        w = tl.reshape(apart, (BLOCK_N, BLOCK_K))
    return tl.dot(x, tl.trans(w.to(x.dtype)), acc)


@triton.jit
def _grouped_gemm_integer_kernel(
    x_MK_ptr, w_ENK_ptr, scale_ENG_ptr, minimum_ENG_ptr, y_MN_ptr, offsets_E_ptr, N, K,
    stride_xm, stride_we, stride_wn, stride_se, stride_sn, stride_ym,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BITS: tl.constexpr, GROUP_K: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    IS_GATED: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """y = epilogue(x @ dequantised(w[expert]).T). BITS 8: int8 [E, rows, K]; 4: uint8
    [E, rows, K / 2], the even column in the low nibble, symmetric values stored as q + 8. GROUP_K
    columns share a scale (and a minimum); 0 is one scale per row, applied to the sum. Gated weights
    as in `_grouped_gemm_kernel`."""
    expert, first, end = _expert_tile(offsets_E_ptr, tl.program_id(0), E, BLOCK_E, BLOCK_M)
    if first >= end:
        return
    first_n = tl.program_id(1) * BLOCK_N
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    offs_b = tl.arange(0, BLOCK_K * BITS // 8)
    rows, cols = offs_m < (end - first).to(tl.int32), offs_n < N - first_n
    x_tile_ptr = x_MK_ptr + first.to(tl.int64) * stride_xm
    w_tile_ptr = w_ENK_ptr + expert.to(tl.int64) * stride_we + first_n.to(tl.int64) * stride_wn
    up_tile_ptr = w_tile_ptr + tl.cast(N, tl.int64) * stride_wn
    x_offs = offs_m[:, None] * stride_xm + offs_k[None, :]
    w_offs = offs_n[:, None] * stride_wn + offs_b[None, :]
    at_scale = expert.to(tl.int64) * stride_se + (first_n + offs_n).to(tl.int64) * stride_sn
    at_up_scale = at_scale + tl.cast(N, tl.int64) * stride_sn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at = step * BLOCK_K
        inside = rows[:, None] & (offs_k[None, :] < K - at)
        x = tl.load(x_tile_ptr + at + x_offs, mask=inside, other=0.0)
        acc = _integer_product(
            acc, x, w_tile_ptr, w_offs, scale_ENG_ptr + at_scale, minimum_ENG_ptr + at_scale,
            step, cols, K, BITS, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if IS_GATED:
            up = _integer_product(
                up, x, up_tile_ptr, w_offs, scale_ENG_ptr + at_up_scale,
                minimum_ENG_ptr + at_up_scale, step, cols, K,
                BITS, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    if GROUP_K == 0:
        acc *= tl.load(scale_ENG_ptr + at_scale, mask=cols, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            up *= tl.load(scale_ENG_ptr + at_up_scale, mask=cols, other=0.0).to(tl.float32)[None, :]
    y = _activated(acc, up, IS_GATED, CLAMP).to(y_MN_ptr.dtype.element_ty)
    y_tile_ptr = y_MN_ptr + first.to(tl.int64) * stride_ym + first_n
    y_offs = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_tile_ptr + y_offs, y, mask=rows[:, None] & cols[None, :])
