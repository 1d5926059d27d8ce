"""Binds the Triton product with a residual, and the norm behind it, to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm_norm import GemmNormRequest
from hal_kernels.fused_gemm.triton import bind as bind_fused
from hal_kernels.norm.triton import bind as bind_norm


def bind(
    request: GemmNormRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor | QuantizedWeight,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """As the op's reference: kernel(x, residual) -> (y, residual), both new. Raises BindingError
    for what `triton_limits` rejects."""
    add = bind_fused(request.fused(), device, weight=weight, bias=bias)
    norm = bind_norm(request.norm(), device, weight=norm_weight, eps=eps)

    def gemm_norm(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = add(x, residual)
        return norm(total), total

    return gemm_norm
