"""Binds the Triton gather to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.embedding import EmbeddingRequest
from hal_kernels.embedding.triton_kernels import _embedding_kernel

_BLOCK = 2048


def bind(
    request: EmbeddingRequest, device: DeviceSpec, *, weight: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """kernel(ids[T]) -> y[T, H]."""
    table, hidden = weight.contiguous(), request.hidden_size
    block = min(_BLOCK, triton.next_power_of_2(hidden))

    def kernel(ids: torch.Tensor) -> torch.Tensor:
        y = torch.empty((ids.shape[0], hidden), dtype=table.dtype, device=ids.device)
        if ids.shape[0]:
            _embedding_kernel[(ids.shape[0], -(-hidden // block))](
                ids, table, y, hidden, BLOCK_H=block
            )
        return y

    return kernel
