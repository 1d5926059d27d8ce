"""Binds the Triton products per expert to requests: stacks the experts' weights once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.formats import QuantizedWeight, torch_dtype
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.low_precision import decode_scale, dequantize_groups
from hal.reasons import Reason
from hal_kernels.gemm.triton_quantised import (
    as_compiled,
    as_fnuz,
    check_numbers,
    rounded_pair,
    rounded_rows,
    rounds_to_ue8m0,
)
from hal_kernels.gemm.triton_results import Rows, wide_rows
from hal_kernels.gemm.triton_tiles import target_of
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.grouped_gemm.integer_kernels import _grouped_gemm_integer_kernel
from hal_kernels.grouped_gemm.integer_variants import INTEGER_FORMS, integer_tiles
from hal_kernels.grouped_gemm.round_variants import GROUP
from hal_kernels.grouped_gemm.triton_kernels import (
    _grouped_gemm_fp8_kernel,
    _grouped_gemm_kernel,
    _grouped_gemm_mxfp4_kernel,
)
from hal_kernels.grouped_gemm.triton_limits import choose_kernel, split_of
from hal_kernels.grouped_gemm.triton_rounding import bind_round_rows
from hal_kernels.grouped_gemm.triton_split_k import SplitExperts, bind_split
from hal_kernels.grouped_gemm.triton_tuning import chosen, whole_shape_of
from hal_kernels.grouped_gemm.triton_variants import tiles
from hal_kernels.grouped_gemm.weight_only_kernels import _grouped_gemm_weight_only_kernel
from hal_kernels.grouped_gemm.weight_only_variants import weight_only_tiles
from hal_kernels.grouped_gemm.widened_kernels import _grouped_gemm_fp8_widened_kernel
from hal_kernels.grouped_gemm.widened_variants import widened_expert_tiles
from hal_kernels.quantize.triton import bind_quantize_groups, bind_quantize_rows
from hal_kernels.tuning.store import tuned_rows

GroupedProduct = Callable[[Rows, torch.Tensor], torch.Tensor]


def bind(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor | Sequence[QuantizedWeight],
) -> GroupedProduct:
    """kernel(x[M, K] sorted by expert, expert_offsets int64 [E+1]) -> y[M, N].

    A product of FP8 operands rounds its rows, or takes what the op quantize made of them: values
    and scales. Rows of another product are taken as they are, and are no such pair (ValueError).
    K is cut for few rows where `triton_limits` says so, but not while configurations are measured.
    Raises BindingError for what `triton_limits` rejects.
    """
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        raise BindingError(
            f"Triton product for {request.label}: {choice.what}",
            choice.required,
            choice.found,
            "select another",
        )
    is_forced = tuned_rows(whole_shape_of(request, device), device).is_forced
    split = None if is_forced else bind_split(request, device, split_of(request, device, choice))
    if isinstance(weight, torch.Tensor):
        return _bind_dense(request, device, weight, split)
    data = torch.stack([expert.data for expert in weight])
    scale = torch.stack([expert.scale for expert in weight])
    if choice.kernel == "grouped_gemm.mxfp4":
        return _bind_mxfp4(request, device, data, scale, split)
    if choice.kernel == "grouped_gemm.integer":
        minimum = [expert.minimum for expert in weight if expert.minimum is not None]
        shift = torch.stack(minimum) if minimum else scale
        return _bind_integer(request, device, (data, scale, shift), choice.config.split("-")[0])
    if choice.kernel == "grouped_gemm.weight_only":
        form = choice.config.split("-")[0]
        product = _bind_weight_only(request, device, data, scale, form, split)
        is_rounded = request.weight_format.activation != "float"
        return _rounded_before(request, product) if is_rounded else product
    return _bind_fp8(request, device, data, scale, choice.dtype, split)


def _rounded_before(request: GroupedGemmRequest, product: GroupedProduct) -> GroupedProduct:
    """A product of rows that are rounded to MXFP8 first, and kept in 16 bits. Rows that come
    rounded are widened, which is exact."""
    rounded, dtype = bind_round_rows(), torch_dtype(request.dtype)

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return product(rounded(x), expert_offsets)
        values, codes = rounded_pair(x, "fp8_e4m3fn", GROUP, reads_codes=True, op=request.label)
        wide = dequantize_groups(
            values, codes, element="fp8_e4m3fn", scale_kind="ue8m0", dtype=dtype
        )
        return product(wide, expert_offsets)

    return kernel


def _launch(
    request: GroupedGemmRequest, device: DeviceSpec, kind: str, group: int = 0, stored: str = ""
) -> Callable[..., Any]:
    """Options and grid for so many rows: experts have tiles of their own, so at most one more each
    than the rows fill. stored: how a weight is that meets rows as they are; "" for others."""
    target = target_of(device)
    experts = request.num_experts
    is_gated = request.epilogue == "silu_gated"
    shared = {
        "E": experts,
        "BLOCK_E": triton.next_power_of_2(experts),
        "IS_GATED": is_gated,
        "CLAMP": request.clamp,
    }

    tuned = tuned_rows(whole_shape_of(request, device), device)

    def default_of(rows: int) -> dict[str, Any]:
        if kind == "fp8_widened":
            return widened_expert_tiles(target, group, rows, is_gated=is_gated)
        if stored in INTEGER_FORMS:
            return integer_tiles(target, stored, rows, is_gated=is_gated)
        if stored:
            return weight_only_tiles(target, stored, rows, is_gated=is_gated)
        return tiles(target, kind, rows, is_gated=is_gated, group=group)

    def launch(rows: int) -> tuple[tuple[int, int], dict[str, Any]]:
        of_expert = -(-rows // experts)
        default = default_of(of_expert)
        config = default | tuned.choose(of_expert, chosen(default)) | shared
        most = min(rows, rows // config["BLOCK_M"] + experts)
        return (most, -(-request.out_features // config["BLOCK_N"])), config

    return launch


def _bind_dense(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    weight: torch.Tensor,
    split: SplitExperts | None,
) -> GroupedProduct:
    packed, launch = weight.contiguous(), _launch(request, device, "dense")
    width = request.out_features

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        x = wide_rows(x, op=request.label)
        y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        if split is not None and split.covers(x.shape[0]):
            split.launch((x, x), (packed, packed), expert_offsets, y)
        elif x.shape[0]:
            grid, config = launch(x.shape[0])
            _grouped_gemm_kernel[grid](
                x, packed, y, expert_offsets, width, request.k,
                x.stride(0), packed.stride(0), packed.stride(1), y.stride(0),
                **config,
            )  # fmt: skip
        return y

    return kernel


def _bind_fp8(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    data: torch.Tensor,
    stored_scale: torch.Tensor,
    fp8: str,
    split: SplitExperts | None,
) -> GroupedProduct:
    form = request.weight_format
    group = int(form.group_size or 0)
    scale = decode_scale(stored_scale, form.scale_dtype)
    if fp8 == "fp8_e4m3fnuz":
        data, scale = as_fnuz(data), scale * 2.0
    data, scale = data.contiguous(), scale.contiguous()
    is_widened = device.arch in WIDENED_UNITS
    kind = "fp8_widened" if is_widened else "fp8"
    launch, width = _launch(request, device, kind, group), request.out_features
    block = {"GROUP_K": group, "SCALE_N": form.block_n}
    product: Any = _grouped_gemm_fp8_kernel
    if is_widened:
        product, data = _grouped_gemm_fp8_widened_kernel, data.view(torch.uint8)
        check_numbers(data, op=request.label)
    quantize = bind_quantize_rows(
        device.arch, group=group, out_dtype=fp8, is_ue8m0=rounds_to_ue8m0(form)
    )

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        rows, y = _rows_and_result(x, request, width)
        if rows:
            values, x_scale = rounded_rows(x, quantize, fp8, group, op=request.label)
            if split is not None and split.covers(rows):
                split.launch((values, x_scale), (data, scale), expert_offsets, y)
                return y
            grid, config = launch(rows)
            product[grid](
                values.view(data.dtype), x_scale, data, scale, y, expert_offsets, width, request.k,
                values.stride(0), x_scale.stride(0), data.stride(0), data.stride(1),
                scale.stride(0), scale.stride(1), y.stride(0),
                **(config | block),
            )  # fmt: skip
        return y

    return kernel


def _bind_mxfp4(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    data: torch.Tensor,
    scale: torch.Tensor,
    split: SplitExperts | None,
) -> GroupedProduct:
    launch, width = _launch(request, device, "mxfp4"), request.out_features
    fp8 = target_of(device).fp8_dtype
    quantize = bind_quantize_groups(group=32, out_dtype=fp8, is_ue8m0=True)

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        rows, y = _rows_and_result(x, request, width)
        if rows:
            values, codes = rounded_rows(x, quantize, fp8, 32, reads_codes=True, op=request.label)
            if split is not None and split.covers(rows):
                split.launch((values, codes), (data, scale), expert_offsets, y)
                return y
            grid, config = launch(rows)
            _grouped_gemm_mxfp4_kernel[grid](
                values, codes, data, scale, y, expert_offsets, width, request.k,
                values.stride(0), codes.stride(0), data.stride(0), data.stride(1),
                scale.stride(0), scale.stride(1), y.stride(0), **config,
            )  # fmt: skip
        return y

    return kernel


def _rows_and_result(x: Rows, request: GroupedGemmRequest, width: int) -> tuple[int, torch.Tensor]:
    values = x if isinstance(x, torch.Tensor) else x[0]
    shape, dtype = (values.shape[0], width), torch_dtype(request.dtype)
    return shape[0], torch.empty(shape, dtype=dtype, device=values.device)


def _bind_weight_only(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    data: torch.Tensor,
    scale: torch.Tensor,
    form: str,
    split: SplitExperts | None,
) -> GroupedProduct:
    launch, width = _launch(request, device, "weight_only", stored=form), request.out_features
    data = data.view(torch.uint8)
    if form == "g128":
        scale = decode_scale(scale, request.weight_format.scale_dtype)
    if form != "mxfp4":
        check_numbers(data, op=request.label)

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        x = wide_rows(x, op=request.label)
        y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        if split is not None and split.covers(x.shape[0]):
            split.launch((x, x), (data, scale), expert_offsets, y)
        elif x.shape[0]:
            grid, config = launch(x.shape[0])
            _grouped_gemm_weight_only_kernel[grid](
                x, data, scale, y, expert_offsets, width, request.k,
                x.stride(0), data.stride(0), data.stride(1), scale.stride(0), scale.stride(1),
                y.stride(0), **config,
            )  # fmt: skip
        return y

    return kernel


def _bind_integer(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    form: str,
) -> GroupedProduct:
    """weight: data, scales and minima (scales where the format has none), of all experts."""
    launch, width = _launch(request, device, "integer", stored=form), request.out_features
    data, scale, minimum = weight
    experts = data.shape[0]
    # A scale of a row is a group of its own: [E, rows, groups].
    scale, minimum = (
        as_compiled(t, request.weight_format, op=request.label)
        .reshape(experts, request.n, -1)
        .contiguous()
        for t in (scale, minimum)
    )

    def kernel(x: Rows, expert_offsets: torch.Tensor) -> torch.Tensor:
        x = wide_rows(x, op=request.label)
        y = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            grid, config = launch(x.shape[0])
            _grouped_gemm_integer_kernel[grid](
                x, data, scale, minimum, y, expert_offsets, width, request.k,
                x.stride(0), data.stride(0), data.stride(1), scale.stride(0), scale.stride(1),
                y.stride(0), **config,
            )  # fmt: skip
        return y

    return kernel
