"""Binds the Triton filter of logits to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.sampling import TopKTopPRequest
from hal_kernels.sampling.triton_kernels import _top_k_top_p_kernel
from hal_kernels.sampling.triton_variants import constants_of, launch_warps


def bind(
    request: TopKTopPRequest, device: DeviceSpec
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """kernel(logits float32 [B, V], top_k int [B], top_p float32 [B]) -> new float32 [B, V]."""

    constants = constants_of(device.arch)
    num_warps = launch_warps(int(device.attributes.get("warp_size", 32)))

    def kernel(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        y = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        if rows.shape[0]:
            _top_k_top_p_kernel[(rows.shape[0],)](
                rows, top_k.contiguous(), top_p.contiguous(), y, rows.stride(0), rows.shape[1],
                **constants, num_warps=num_warps,
            )  # fmt: skip
        return y

    return kernel
