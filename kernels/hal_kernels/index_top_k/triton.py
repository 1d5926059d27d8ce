"""Binds the Triton choice of entries to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.index_top_k import IndexTopKRequest
from hal_kernels.index_top_k.triton_kernels import _index_top_k_kernel
from hal_kernels.index_top_k.triton_limits import not_written_reasons
from hal_kernels.index_top_k.triton_variants import tiles

IndexTopK = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def bind(request: IndexTopKRequest, device: DeviceSpec) -> IndexTopK:
    """kernel(logits float32 [T, entries], visible int32 [T]) -> int32 [T, width].

    Lists are by rising index. Raises BindingError for what `triton_limits` rejects.
    """
    for reason in not_written_reasons(request):
        raise BindingError(
            f"Triton index lists for {request.label}: {reason.what}",
            reason.required,
            reason.found,
            "select another",
        )
    constants = {
        "TOP_K": request.top_k,
        "POOL": request.pool_size,
        "BLOCK_P": triton.next_power_of_2(request.pool_size),
        **tiles(request.pool_size),
    }

    def kernel(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        tokens, entries = logits.shape
        out = torch.empty((tokens, request.width), dtype=torch.int32, device=logits.device)
        if tokens:
            _index_top_k_kernel[(tokens,)](
                logits, visible, out, entries, logits.stride(0), out.stride(0), **constants
            )
        return out

    return kernel
