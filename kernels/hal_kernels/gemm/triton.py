"""Binds the Triton products to requests, the dense ones here: packs the weight once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.formats import QuantizedWeight
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason
from hal_kernels.gemm.dense_forms import dense_size, dense_suffix, has_wide_tiles, units_of
from hal_kernels.gemm.triton_kernels import _gemm_kernel, _split_k_kernel
from hal_kernels.gemm.triton_limits import choose_kernel
from hal_kernels.gemm.triton_quantised import Product, bind_quantised
from hal_kernels.gemm.triton_results import Epilogue, Result
from hal_kernels.gemm.triton_stream_k import bind_stream_k
from hal_kernels.gemm.triton_tiles import grid_of, target_of
from hal_kernels.gemm.triton_tuning import shape_of
from hal_kernels.gemm.triton_variants import configurations
from hal_kernels.tuning.store import tuned_rows

__all__ = [
    "Product",
    "bind",
    "bind_dense_launch",
    "bind_quantised",
    "not_written_error",
    "target_of",
]


def bind(
    request: GemmRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Product:
    """kernel(x[T, K]) -> y[T, N]. A product of FP8 operands takes x also as the pair (values,
    scales) that `quantize` and `fused_gemm` give, and then rounds nothing. Raises BindingError for
    what `triton_limits` rejects."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        raise not_written_error(request, choice)
    if isinstance(weight, torch.Tensor):
        return _bind_dense(request, device, weight, bias)
    return bind_quantised(request, device, choice.kernel, weight, bias)


def not_written_error(request: GemmRequest, reason: Reason) -> BindingError:
    """The error for a request that limits reject."""
    return BindingError(
        f"Triton product for {request.label}: {reason.what}",
        reason.required,
        reason.found,
        "select another",
    )


def _bind_dense(
    request: GemmRequest,
    device: DeviceSpec,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Product:
    packed, target = weight.contiguous(), target_of(device)
    tuned = tuned_rows(shape_of(request, device), device)
    stream_k = bind_stream_k(request, device, weight=packed, bias=bias)
    table = "gemm_gated" if request.epilogue == "silu_gated" else "gemm"
    launch = bind_dense_launch(request, packed, bias)
    tiles, features, k = configurations(table, target), request.out_features, request.k
    suffix = dense_suffix(request) or "-float32" * (request.out_dtype == "float32")
    choose_size = partial(
        dense_size, target, table, units_of(device), features=features, k=k,
        has_wide=has_wide_tiles(device, "gemm.dense", request.dtype, suffix),
    )  # fmt: skip

    def kernel(x: torch.Tensor) -> Any:
        rows = x.shape[0]
        result = Epilogue(request).result(rows, x.device, None)
        y = result.y
        if rows and (stream_k is None or tuned.covers(rows) or not stream_k(x, y)):
            launch(x, result, tuned.choose(rows, tiles[choose_size(rows=rows)]))
        return y

    return kernel


def bind_dense_launch(
    request: GemmRequest, packed: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor, Result, Mapping[str, int]], None]:
    """launch(x, result, configuration): the product, and the sum of its parts where K is split."""
    features = request.out_features
    halves = 2 if request.epilogue == "silu_gated" else 1
    form = {**Epilogue(request).constants, "HAS_BIAS": bias is not None}
    bias_or_any = packed if bias is None else bias

    def launch(x: torch.Tensor, result: Result, config: Mapping[str, int]) -> None:
        rows, splits = x.shape[0], config["SPLIT_K"]
        shape = (splits * halves, rows, features) if splits > 1 else (1,)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        _gemm_kernel[(grid_of(config, rows, features), splits)](
            x, packed, bias_or_any, *result.pointers, part, rows, features, request.k,
            x.stride(0), packed.stride(0), *result.strides, **form, **config,
        )  # fmt: skip
        if splits > 1:
            block = min(1024, triton.next_power_of_2(features))
            _split_k_kernel[(rows, triton.cdiv(features, block))](
                part, bias_or_any, *result.pointers, rows, features, *result.strides,
                BLOCK_N=block, SPLIT_K=splits, **form,
            )  # fmt: skip

    return launch
