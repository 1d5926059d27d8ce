"""Binds the Triton norm to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.norm import RmsNormRequest
from hal_kernels.norm.triton_kernels import _rms_norm_kernel, _rms_norm_looped_kernel
from hal_kernels.norm.triton_variants import STEP, WIDTHS, launch_tile


def bind(
    request: RmsNormRequest, device: DeviceSpec, *, weight: torch.Tensor, eps: float
) -> Callable[..., Any]:
    """As the op's reference: kernel(x) or kernel(x, residual), the residual updated in place and
    returned; with quantize (int8 rows, scales)."""
    hidden, is_quantised = request.hidden_size, request.quantize != "none"
    is_kept = hidden <= WIDTHS[-1]
    block = triton.next_power_of_2(hidden) if is_kept else STEP
    tile, warps = launch_tile(block, int(device.attributes.get("warp_size", 32)))

    def run(x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        rows = x.reshape(x.numel() // hidden, hidden)
        count = rows.shape[0]
        y = torch.empty(rows.shape, dtype=torch.int8 if is_quantised else x.dtype, device=x.device)
        scale = torch.empty((count, 1), dtype=torch.float32, device=x.device)
        added = rows if residual is None else residual.view(rows.shape)
        tensors = (rows, added, weight, y, scale, rows.stride(0), added.stride(0), y.stride(0))
        forms = {"HAS_RESIDUAL": residual is not None, "IS_QUANTISED": is_quantised}
        if count and is_kept:
            _rms_norm_kernel[(-(-count // tile),)](
                *tensors, count, hidden, eps, BLOCK_R=tile, BLOCK_H=block, **forms,
                num_warps=warps,
            )  # fmt: skip
        elif count:
            _rms_norm_looped_kernel[(count,)](
                *tensors, hidden, eps, BLOCK_H=block, **forms, num_warps=warps
            )
        return (y.view(x.shape), scale) if is_quantised else y.view(x.shape)

    def norm(x: torch.Tensor) -> Any:
        return run(x, None)

    def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return run(x, residual), residual

    return norm_residual if request.has_residual else norm
