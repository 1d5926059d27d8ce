"""Products with FP8 weights in blocks whose activations stay as they are, in Triton.

Suffixes of tensor names: M rows (tokens), N output features, K input features, B blocks of scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.gemm.epilogues import _store_result
from hal_kernels.gemm.triton_kernels import _tile_of
from hal_kernels.kv_write.packed_rows import decode_e4m3


@triton.jit
def _gemm_fp8_weight_kernel(
    x_MK_ptr, w_NK_ptr, scale_BB_ptr, y_MN_ptr, residual_MN_ptr,
    M, N, K, stride_xm, stride_wn, stride_sb, stride_ym, stride_rm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, GROUP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr = False,
):  # fmt: skip
    """y = x @ (w * scale).T on the 16-bit matrix unit. w: e4m3fn bits (uint8) that hold no NaN;
    scale: float32 [N / GROUP_K, K / GROUP_K]. A value is exact in 16 bits and its scale need not
    be, so each block's product is scaled into the float32 sum."""
    block_m, block_n = _tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, GROUP_K)
    rows, cols = offs_m < M, offs_n < N
    x_ptrs = x_MK_ptr + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_NK_ptr + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    scale_ptrs = scale_BB_ptr + (offs_n // GROUP_K).to(tl.int64) * stride_sb
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(tl.cdiv(K, GROUP_K)):
        inside = (group * GROUP_K + offs_k)[None, :] < K
        x = tl.load(x_ptrs + group * GROUP_K, mask=rows[:, None] & inside, other=0.0)
        bits = tl.load(w_ptrs + group * GROUP_K, mask=cols[:, None] & inside, other=0)
        scale = tl.load(scale_ptrs + group, mask=cols, other=0.0)
        acc += tl.dot(x, tl.trans(decode_e4m3(bits).to(x.dtype))) * scale[None, :]
    _store_result(
        acc, y_MN_ptr, y_MN_ptr, residual_MN_ptr, offs_m, offs_n, M, N, stride_ym, stride_rm,
        HAS_RESIDUAL, 0, 0.0, False,
    )  # fmt: skip
