"""Binds the Triton rotation to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.rope import RopeRequest
from hal_kernels.rope.triton_kernels import _rope_kernel
from hal_kernels.rope.triton_variants import MANY_TOKENS, head_block


def bind(
    request: RopeRequest, device: DeviceSpec, *, cos_sin_cache: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """kernel(q[T, H*D], k[T, K*D] or None, positions[T]) in place; rows may be strided."""
    table = cos_sin_cache.float().contiguous()
    block_r = max(1, triton.next_power_of_2(request.rotary_dim // 2))
    warp_size = int(device.attributes.get("warp_size", 32))

    def kernel(q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor) -> None:
        kv_heads = 0 if k is None else request.num_kv_heads
        block_h, warps = head_block(max(request.num_heads, kv_heads), block_r, warp_size)
        blocks = -(-request.num_heads // block_h) + -(-kv_heads // block_h)
        other = q if k is None else k
        tokens = q.shape[0]
        if tokens:
            _rope_kernel[(tokens, 1 if tokens >= MANY_TOKENS else blocks)](
                q, other, positions, table, q.stride(0), other.stride(0),
                NUM_HEADS=request.num_heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=request.head_dim,
                ROTARY_DIM=request.rotary_dim, ROTARY_START=request.rotary_start,
                BLOCK_H=block_h, BLOCK_R=block_r,
                IS_INTERLEAVED=request.is_interleaved, IS_INVERSE=request.is_inverse,
                num_warps=warps,
            )  # fmt: skip

    return kernel
