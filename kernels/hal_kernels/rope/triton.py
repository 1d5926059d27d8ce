"""Binds the Triton rotation to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.rope import RopeRequest
from hal_kernels.rope.triton_kernels import _rope_kernel
from hal_kernels.rope.triton_variants import program_pairs


def bind(
    request: RopeRequest, device: DeviceSpec, *, cos_sin_cache: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """kernel(q[T, H*D], k[T, K*D] or None, positions[T]) in place; rows may be strided."""
    table = cos_sin_cache.float().contiguous()
    block_r = max(1, triton.next_power_of_2(request.rotary_dim // 2))
    pairs = program_pairs(int(device.attributes.get("warp_size", 32)))

    def kernel(q: torch.Tensor, k: torch.Tensor | None, positions: torch.Tensor) -> None:
        kv_heads = 0 if k is None else request.num_kv_heads
        most = triton.next_power_of_2(max(request.num_heads, kv_heads))
        block_h = max(1, min(pairs // block_r, most))
        blocks = -(-request.num_heads // block_h) + -(-kv_heads // block_h)
        other = q if k is None else k
        if q.shape[0]:
            _rope_kernel[(q.shape[0], blocks)](
                q, other, positions, table, q.stride(0), other.stride(0),
                NUM_HEADS=request.num_heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=request.head_dim,
                ROTARY_DIM=request.rotary_dim, ROTARY_START=request.rotary_start,
                BLOCK_H=block_h, BLOCK_R=block_r,
                IS_INTERLEAVED=request.is_interleaved, IS_INVERSE=request.is_inverse,
            )  # fmt: skip

    return kernel
