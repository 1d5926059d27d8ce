"""Binds the Triton norm with rounding to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.ops.norm_quantize import NormQuantizeRequest
from hal_kernels.norm_quantize.triton_kernels import (
    _norm_quantize_kernel,
    _norm_quantize_looped_kernel,
)
from hal_kernels.norm_quantize.triton_variants import (
    WIDTHS,
    forms_of,
    launch_blocks,
    looped_blocks,
)
from hal_kernels.quantize.triton_variants import LARGEST


def bind(
    request: NormQuantizeRequest, device: DeviceSpec, *, weight: torch.Tensor, eps: float
) -> Callable[..., tuple[Any, ...]]:
    """As the op's reference: kernel(x[T, H]) or kernel(x, residual), the residual updated in place
    and returned -> (values, scales[, y][, residual])."""
    hidden, groups = request.hidden_size, request.groups
    warp_size = int(device.attributes.get("warp_size", 32))
    kernel = _norm_quantize_kernel
    forms = forms_of(device.arch, request.out_dtype, request.scale_dtype == "ue8m0")
    if hidden <= WIDTHS[-1]:
        group, block, warps = launch_blocks(hidden, request.group_size, warp_size)
    else:
        kernel, forms["IS_ROW"] = _norm_quantize_looped_kernel, not request.group_size
        group, block, warps = looped_blocks(request.group_size, warp_size)
    dtype: torch.dtype = getattr(torch, request.out_dtype.replace("fp8", "float8"))

    def run(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Any, ...]:
        rows = x.shape[0]
        values = torch.empty((rows, hidden), dtype=dtype, device=x.device)
        scale_dtype = torch.uint8 if forms["IS_UE8M0"] else torch.float32
        scales = torch.empty((rows, groups), dtype=scale_dtype, device=x.device)
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if request.keeps_rows else x
        added = x if residual is None else residual
        if rows:
            stored = values.view(torch.uint8) if forms["IS_BITS"] else values
            kernel[(rows,)](
                x, added, weight, y, stored, scales, x.stride(0), added.stride(0), hidden, groups,
                eps, GROUP=group, BLOCK_G=block, HAS_RESIDUAL=residual is not None,
                KEEPS_ROWS=request.keeps_rows, LARGEST=LARGEST[request.out_dtype],
                IS_INTEGER=request.out_dtype == "int8", num_warps=warps, **forms,
            )  # fmt: skip
        return (values, scales, y) if request.keeps_rows else (values, scales)

    def norm(x: torch.Tensor) -> tuple[Any, ...]:
        return run(x, None)

    def norm_residual(x: torch.Tensor, residual: torch.Tensor) -> tuple[Any, ...]:
        return *run(x, residual), residual

    return norm_residual if request.has_residual else norm
