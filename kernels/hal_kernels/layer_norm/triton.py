"""Binds the Triton layer norm to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.layer_norm import LayerNormRequest
from hal_kernels.layer_norm.triton_kernels import _layer_norm_kernel
from hal_kernels.layer_norm.triton_variants import WIDTHS


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
    block = triton.next_power_of_2(hidden)
    scale, shift = weight.contiguous(), None if bias is None else bias.contiguous()

    def norm(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(x.numel() // hidden, hidden)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if rows.shape[0]:
            _layer_norm_kernel[(rows.shape[0],)](
                rows, scale, scale if shift is None else shift, y,
                rows.stride(0), y.stride(0), hidden, eps,
                BLOCK_H=block, HAS_BIAS=shift is not None,
                num_warps=next((n for most, n in WIDTHS.items() if block <= most), 8),
            )  # fmt: skip
        return y.view(x.shape)

    return norm
