"""Binds the pass from projection to attention to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.kv_write import check_scales
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal_kernels.kv_write.cache_dtypes import as_compiled
from hal_kernels.rope_kv_write.triton_kernels import _rope_kv_write_kernel
from hal_kernels.rope_kv_write.triton_variants import VALUE_BLOCK, launch_blocks


def bind(
    request: RopeKvWriteRequest,
    device: DeviceSpec,
    *,
    cos_sin_cache: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Callable[..., torch.Tensor]:
    """kernel(q, k, v, positions, k_cache, v_cache, slot_mapping) -> q, in place; k stays as it was.
    Rows of q, k and v may be strided; the caches are contiguous.

    Raises ValueError without the weights of the norms where there are norms, and for scales that
    the request does not have.
    """
    check_scales("rope_kv_write", request.has_kv_scales, k_scale, v_scale)
    if request.has_qk_norm and (q_weight is None or k_weight is None):
        raise ValueError("rope_kv_write: required q_weight and k_weight with has_qk_norm")
    table = cos_sin_cache.float().contiguous()
    block_r, block_p, block_h = launch_blocks(
        request.head_dim,
        request.rotary_dim,
        max(request.num_heads, request.num_kv_heads),
        int(device.attributes.get("warp_size", 32)),
    )
    v_width = request.num_kv_heads * request.v_head_dim
    block_v = min(VALUE_BLOCK, triton.next_power_of_2(v_width))
    blocks = (
        -(-request.num_heads // block_h)
        + -(-request.num_kv_heads // block_h)
        + -(-v_width // block_v)
    )

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        tokens = slot_mapping.shape[0]
        k_cache, v_cache = (as_compiled(cache, device.arch) for cache in (k_cache, v_cache))
        if tokens:
            _rope_kv_write_kernel[(tokens, blocks)](
                q, k, v, table if q_weight is None else q_weight,
                table if k_weight is None else k_weight, positions, table, k_cache, v_cache,
                slot_mapping, q.stride(0), k.stride(0), v.stride(0), eps, k_scale, v_scale,
                NUM_HEADS=request.num_heads, NUM_KV_HEADS=request.num_kv_heads,
                HEAD_DIM=request.head_dim, V_WIDTH=v_width, ROTARY_DIM=request.rotary_dim,
                BLOCK_H=block_h, BLOCK_R=block_r, BLOCK_P=block_p, BLOCK_V=block_v,
                HAS_NORM=request.has_qk_norm, IS_INTERLEAVED=request.style == "interleaved",
                HAS_SCALES=request.has_kv_scales,
            )  # fmt: skip
        return q

    return kernel
