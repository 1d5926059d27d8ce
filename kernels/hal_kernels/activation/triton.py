"""Binds the Triton gated activation to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal_kernels.activation.triton_kernels import _gated_activation_kernel
from hal_kernels.activation.triton_variants import row_block


def bind(
    request: GatedActivationRequest, device: DeviceSpec
) -> Callable[[torch.Tensor], torch.Tensor]:
    """kernel(x[R, 2*F]) -> y[R, F]."""
    width = request.width
    most = row_block(int(device.attributes.get("warp_size", 32)))
    block = min(most, triton.next_power_of_2(width))

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            _gated_activation_kernel[(x.shape[0], -(-width // block))](
                x, y, x.stride(0), y.stride(0), width, float(request.clamp),
                BLOCK_F=block, IS_GELU=request.activation == "gelu_tanh",
                HAS_CLAMP=bool(request.clamp),
            )  # fmt: skip
        return y

    return kernel
