"""Binds the Triton products with what follows them to requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.ops.formats import QuantizedWeight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.reasons import Reason
from hal_kernels.fused_gemm.triton_limits import choose_kernels, form_of
from hal_kernels.fused_gemm.triton_variants import dense_table
from hal_kernels.gemm.dense_forms import dense_size, has_wide_tiles, units_of
from hal_kernels.gemm.triton import (
    Product,
    bind_dense_launch,
    bind_quantised,
    not_written_error,
    target_of,
)
from hal_kernels.gemm.triton_limits import choose_kernel
from hal_kernels.gemm.triton_results import Epilogue
from hal_kernels.gemm.triton_variants import configurations


def bind(
    request: FusedGemmRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Product:
    """As the op's reference: kernel(x[T, K]) or kernel(x, residual[T, N]) -> y, or (values, scales)
    of a rounded result. A product of FP8 operands takes x rounded already, as that of the op `gemm`
    does. Raises BindingError for what `triton_limits` rejects."""
    choices = choose_kernels(request, device)
    if isinstance(choices, Reason):
        raise not_written_error(request, choices)
    if isinstance(weight, torch.Tensor):
        return _bind_dense(request, device, weight, bias)
    whole = choose_kernel(request.product(), device)
    if isinstance(whole, Reason):
        raise not_written_error(request, whole)
    return bind_quantised(request, device, whole.kernel, weight, bias)


def _bind_dense(
    request: FusedGemmRequest,
    device: DeviceSpec,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Product:
    launch = bind_dense_launch(request, weight.contiguous(), bias)
    target, after = target_of(device), Epilogue(request)
    form = form_of(request)
    table = dense_table(form)
    choose_size = partial(
        dense_size, target, table, units_of(device), features=request.out_features, k=request.k,
        has_wide=has_wide_tiles(device, "fused_gemm.dense", request.dtype, f"-{form}"),
    )  # fmt: skip
    whole = configurations(table, target)
    parts = configurations("gemm_gated" if request.epilogue == "silu_gated" else "gemm", target)

    def kernel(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        rows = x.shape[0]
        result = after.result(rows, x.device, residual)
        if rows:
            size = choose_size(rows=rows)
            launch(x, result, (parts if size == "split" else whole)[size])
        return result.rows

    return kernel
