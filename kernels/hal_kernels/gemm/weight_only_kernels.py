"""Products whose weight alone is quantised, in Triton: FP8 blocks, int8 and int4.

Suffixes of tensor names: M rows (tokens), N output features, K input features, G groups that share
a scale. Weights are widened in registers and meet the rows as they are, on the 16-bit matrix unit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.epilogues import EPILOGUE_SILU_GATED, _finish, _store_result
from hal_kernels.gemm.triton_kernels import _tile_of
from hal_kernels.kv_write.packed_rows import decode_e4m3

FP8_WEIGHT = tl.constexpr(2)  # e4m3 bits in square blocks, float32 scales
INT8 = tl.constexpr(3)
INT4 = tl.constexpr(4)  # the integers are last; `split_k_kernels` has the kinds before
ZERO = tl.constexpr(2)  # of HAS_MINIMUM: (value - minimum) * scale, and not value * scale + minimum


@triton.jit
def _widened_integers(
    w_rows, scale_rows, minimum_rows, step, cols, K,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_K] of a step; without the scale where that is one of a row (GROUP_K
    0). Of a group a scale is loaded once, not for each of its values. HAS_MINIMUM: 0, 1 or ZERO."""
    at_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = cols[:, None] & (at_k[None, :] < K)
    if KIND == INT8:
        w = tl.load(w_rows[:, None] + at_k[None, :], mask=inside, other=0).to(tl.float32)
    else:
        at_b = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        # K is whole groups, of 32 at least: said so that a thread may load 16 bytes under the mask.
        in_b = cols[:, None] & (at_b[None, :] < K // 32 * 16)
        packed = tl.load(w_rows[:, None] + at_b[None, :], mask=in_b, other=0)
        w = tl.join(packed & 0xF, packed >> 4).reshape(BLOCK_N, BLOCK_K).to(tl.float32)
        if not HAS_MINIMUM:
            w -= 8.0
    if GROUP_K >= BLOCK_K:  # a step lies in one group
        at_g = step * BLOCK_K // GROUP_K
        scale = tl.load(scale_rows + at_g, mask=cols, other=0.0).to(tl.float32)[:, None]
        if HAS_MINIMUM:
            offset = tl.load(minimum_rows + at_g, mask=cols, other=0.0).to(tl.float32)[:, None]
            w = (w - offset) * scale if HAS_MINIMUM == ZERO else w * scale + offset
        else:
            w *= scale
    elif GROUP_K > 0:
        groups: tl.constexpr = BLOCK_K // GROUP_K
        at_g = step * groups + tl.arange(0, groups)
        in_g = cols[:, None] & (at_g[None, :] < tl.cdiv(K, GROUP_K))
        scale = tl.load(scale_rows[:, None] + at_g[None, :], mask=in_g, other=0.0)
        scale = scale.to(tl.float32)[:, :, None]
        apart = tl.reshape(w, (BLOCK_N, groups, GROUP_K))
        if HAS_MINIMUM:
            offset = tl.load(minimum_rows[:, None] + at_g[None, :], mask=in_g, other=0.0)
            offset = offset.to(tl.float32)[:, :, None]
            apart = (apart - offset) * scale if HAS_MINIMUM == ZERO else apart * scale + offset
        else:
            apart *= scale
        w = tl.reshape(apart, (BLOCK_N, BLOCK_K))
    return w


@triton.jit
def _add_widened(
    acc, x, w_rows, scale_rows, minimum_rows, step, cols, K,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T of one step. *_rows: of the first column of each row of w [BLOCK_N]. An e4m3
    value is exact in 16 bits and its scale need not be, so a step is one block of them, whose
    product is scaled into the sum."""
    if KIND >= INT8:
        w = _widened_integers(
            w_rows, scale_rows, minimum_rows, step, cols, K, KIND, GROUP_K, HAS_MINIMUM,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    else:
        at_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = cols[:, None] & (at_k[None, :] < K)
        bits = tl.load(w_rows[:, None] + at_k[None, :], mask=inside, other=0)
        scale = tl.load(scale_rows + step, mask=cols, other=0.0)
        acc += tl.dot(x, tl.trans(decode_e4m3(bits).to(x.dtype))) * scale[None, :]
    return acc


@triton.jit
def _gemm_weight_only_kernel(
    x_MK_ptr, w_ptr, scale_NG_ptr, minimum_NG_ptr, bias_N_ptr,
    y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr,
    M, N, K, stride_xm, stride_wn, stride_sn, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    KIND: tl.constexpr, GROUP_K: tl.constexpr, SCALE_N: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    HAS_BIAS: tl.constexpr = False, EPILOGUE: tl.constexpr = 0, CLAMP: tl.constexpr = 0.0,
    HAS_RESIDUAL: tl.constexpr = False, OUT_GROUP: tl.constexpr = 0,
    OUT_LARGEST: tl.constexpr = 0.0, OUT_UE8M0: tl.constexpr = False,
):  # fmt: skip
    """y = epilogue(x @ dequantised(w).T + bias). KIND FP8_WEIGHT: e4m3fn bits (uint8 [N, K]) that
    hold no NaN, and a step is one block: BLOCK_K is GROUP_K; INT8: int8 [N, K]; INT4: uint8
    [N, K / 2], the even column in the low nibble, symmetric values stored as q + 8. GROUP_K values
    along K of SCALE_N rows share a scale (and a minimum); 0 is one scale per row, applied to the
    sum. N is the number of columns of y: a gated epilogue reads weight rows [0, N) as gate and
    [N, 2N) as up.
    """
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    w_rows = w_ptr + offs_n.to(tl.int64) * stride_wn
    up_rows = w_ptr + (offs_n + N).to(tl.int64) * stride_wn
    at_scale = (offs_n // SCALE_N).to(tl.int64) * stride_sn
    at_up_scale = ((offs_n + N) // SCALE_N).to(tl.int64) * stride_sn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at_k = step * BLOCK_K + offs_k
        x = tl.load(x_ptrs + at_k[None, :], mask=rows[:, None] & (at_k[None, :] < K), other=0.0)
        acc = _add_widened(
            acc, x, w_rows, scale_NG_ptr + at_scale, minimum_NG_ptr + at_scale, step, cols, K,
            KIND, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if EPILOGUE == EPILOGUE_SILU_GATED:
            up = _add_widened(
                up, x, up_rows, scale_NG_ptr + at_up_scale, minimum_NG_ptr + at_up_scale, step,
                cols, K, KIND, GROUP_K, HAS_MINIMUM, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    if GROUP_K == 0:
        acc *= tl.load(scale_NG_ptr + at_scale, mask=cols, other=0.0).to(tl.float32)[None, :]
        if EPILOGUE == EPILOGUE_SILU_GATED:
            up *= tl.load(scale_NG_ptr + at_up_scale, mask=cols, other=0.0).to(tl.float32)[None, :]
    y = _finish(acc, up, bias_N_ptr, offs_n, N, HAS_BIAS, EPILOGUE, CLAMP)
    _store_result(
        y, y_MN_ptr, y_scale_MG_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, OUT_GROUP, OUT_LARGEST, OUT_UE8M0,
    )  # fmt: skip
