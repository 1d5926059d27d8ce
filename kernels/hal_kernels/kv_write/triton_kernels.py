"""KV write in Triton: keys and values of new tokens into their slots, in one launch.

Suffixes of tensor names: T tokens, S slots of the cache, K cached heads times head size (a row).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.cache_rounding import of_cache


@triton.jit
def _kv_write_kernel(
    k_TK_ptr, v_TK_ptr, k_cache_SK_ptr, v_cache_SK_ptr, slots_T_ptr, stride_k, stride_v,
    k_scale, v_scale,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program (token, block of BLOCK columns of a row). Scales: as of `of_cache`."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_T_ptr + token).to(tl.int64)
    k = tl.load(k_TK_ptr + token * stride_k + offs, mask=offs < K_WIDTH, other=0.0)
    v = tl.load(v_TK_ptr + token * stride_v + offs, mask=offs < V_WIDTH, other=0.0)
    k_row, v_row = k_cache_SK_ptr + slot * K_WIDTH + offs, v_cache_SK_ptr + slot * V_WIDTH + offs
    k = of_cache(k, k_scale, k_cache_SK_ptr.dtype.element_ty, HAS_SCALES)
    v = of_cache(v, v_scale, v_cache_SK_ptr.dtype.element_ty, HAS_SCALES)
    tl.store(k_row, k, mask=offs < K_WIDTH)
    tl.store(v_row, v, mask=offs < V_WIDTH)
