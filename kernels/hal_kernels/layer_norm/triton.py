"""Binds the Triton layer norm to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.layer_norm import LayerNormRequest
from hal_kernels.layer_norm.triton_kernels import _layer_norm_kernel, _layer_norm_looped_kernel
from hal_kernels.norm.triton_variants import STEP, WIDTHS, launch_tile


def bind(
    request: LayerNormRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As the op's reference: kernel(x), a norm of each hidden_size values. Raises ValueError if the
    bias is not what the request says."""
    if (bias is not None) != request.has_bias:
        raise ValueError(
            f"layer_norm: required a bias as has_bias={request.has_bias} says, "
            f"found {'none' if bias is None else list(bias.shape)}"
        )
    hidden = request.hidden_size
    is_kept = hidden <= WIDTHS[-1]
    block = triton.next_power_of_2(hidden) if is_kept else STEP
    tile, warps = launch_tile(block, int(device.attributes.get("warp_size", 32)))
    scale, shift = weight.contiguous(), None if bias is None else bias.contiguous()

    def norm(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(x.numel() // hidden, hidden)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        count = rows.shape[0]
        tensors = (rows, scale, scale if shift is None else shift, y, rows.stride(0), y.stride(0))
        if count and is_kept:
            _layer_norm_kernel[(-(-count // tile),)](
                *tensors, count, hidden, eps, BLOCK_R=tile, BLOCK_H=block,
                HAS_BIAS=shift is not None, num_warps=warps,
            )  # fmt: skip
        elif count:
            _layer_norm_looped_kernel[(count,)](
                *tensors, hidden, eps, BLOCK_H=block, HAS_BIAS=shift is not None, num_warps=warps
            )
        return y.view(x.shape)

    return norm
