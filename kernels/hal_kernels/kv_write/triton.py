"""Binds the Triton KV write to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.kv_write import KvWriteRequest
from hal_kernels.kv_write.triton_kernels import _kv_write_kernel

_BLOCK = 1024


def bind(request: KvWriteRequest, device: DeviceSpec) -> Callable[..., None]:
    """kernel(k, v, k_cache, v_cache, slot_mapping); rows of k and v may be strided, the caches
    are contiguous."""
    k_width = request.num_kv_heads * request.head_dim
    v_width = request.num_kv_heads * request.v_head_dim
    widest = max(k_width, v_width)
    block = min(_BLOCK, triton.next_power_of_2(widest))

    def kernel(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        tokens = slot_mapping.shape[0]
        if tokens:
            _kv_write_kernel[(tokens, -(-widest // block))](
                k, v, k_cache, v_cache, slot_mapping, k.stride(0), v.stride(0),
                K_WIDTH=k_width, V_WIDTH=v_width, BLOCK=block,
            )  # fmt: skip

    return kernel
