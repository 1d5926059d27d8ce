"""Binds the Triton products with quantised weights to requests: packs the weight once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.formats import QuantizedWeight
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.ops.low_precision import decode_scale, encode_ue8m0
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.fp8_weight_kernels import _gemm_fp8_weight_kernel
from hal_kernels.gemm.triton_kernels import (
    _gemm_fp8_block_kernel,
    _gemm_mxfp8_kernel,
    _gemm_weight_only_kernel,
)
from hal_kernels.gemm.triton_limits import fp8_dtype, size_of, wide_suffix
from hal_kernels.gemm.triton_results import Epilogue, Rows, eight_bits
from hal_kernels.gemm.triton_split_k import SplitK, bind_split_k
from hal_kernels.gemm.triton_tiles import grid_of, pick, target_of
from hal_kernels.gemm.triton_tuning import whole_shape_of
from hal_kernels.gemm.triton_variants import configurations, fp8_weight_tiles
from hal_kernels.quantize.triton import Quantizer, bind_quantize_groups
from hal_kernels.tuning.store import TunedRows, tuned_rows

Product = Callable[..., Any]


def bind_quantised(
    request: GemmRequest, device: DeviceSpec, kernel: str, weight: QuantizedWeight
) -> Product:
    """The product of a quantised weight by a kernel of the catalogue, with what follows it. Nothing
    is tuned for a fused one: tiles of a rounded result have to be whole groups wide. Few rows are
    split along K where `triton_limits` says so, but not while configurations are measured."""
    shape = None if isinstance(request, FusedGemmRequest) else whole_shape_of(request, device)
    target, tuned = target_of(device), tuned_rows(shape, device)
    split = None if tuned.is_forced else bind_split_k(request, device, kernel, target)
    if kernel == "gemm.mxfp8":
        return _bind_mxfp8(request, target, weight, tuned, split)
    if kernel == "gemm.fp8_block":
        return _bind_fp8_block(request, target, weight, fp8_dtype(device), tuned, split)
    if kernel == "gemm.fp8_weight_only":
        return _bind_fp8_weight_only(request, target, weight, split)
    return _bind_weight_only(request, target, weight, tuned, split)


def _bind_fp8_block(
    request: GemmRequest,
    target: Target,
    weight: QuantizedWeight,
    fp8: str,
    tuned: TunedRows,
    split: SplitK | None,
) -> Product:
    form, after = weight.format, Epilogue(request)
    group = int(form.group_size or 0)
    data, scale = weight.data.contiguous(), decode_scale(weight.scale, form.scale_dtype)
    if fp8 == "fp8_e4m3fnuz":
        data, scale = as_fnuz(data), scale * 2.0
    scale = scale.contiguous()
    is_ue8m0 = "ue8m0" in request.weight_format.activation or (
        request.weight_format.activation.startswith("mxfp8")
    )
    quantize = bind_quantize_groups(group=group, out_dtype=fp8, is_ue8m0=False)
    if is_ue8m0:
        quantize = with_decoded_scales(group, fp8)
    found = configurations("gemm_fp8_block", target)
    stem = f"g{group}{wide_suffix(request)}"

    def kernel(x: Rows, residual: torch.Tensor | None = None) -> Rows:
        values, x_scale = rounded_rows(x, quantize, fp8, group)
        if x_scale.dtype == torch.uint8:
            x_scale = decode_scale(x_scale, "ue8m0")
        rows = values.shape[0]
        result = after.result(rows, values.device, residual)
        name = f"{stem}-small" if size_of(rows) == "small" else stem
        features = request.out_features
        if split is not None and split.covers(rows):
            split.launch((values, x_scale), (data, scale, scale), result)
        elif rows:
            config = tuned.choose(rows, found[name])
            _gemm_fp8_block_kernel[(grid_of(config, rows, features),)](
                values, x_scale, data, scale, *result.pointers, rows, features, request.k,
                values.stride(0), x_scale.stride(0), data.stride(0), scale.stride(0),
                *result.strides, **after.constants, **config,
            )  # fmt: skip
        return result.rows

    return kernel


def rounded_rows(
    x: Rows, quantize: Quantizer, fp8: str, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of x, rounded here unless it comes rounded. Raises ValueError for values of
    another type, or scales that are not one a row and group."""
    if isinstance(x, torch.Tensor):
        return quantize(x)
    values, scale = x
    groups = (values.shape[0], -(-values.shape[1] // group))
    if values.dtype != eight_bits(fp8) or scale.shape != groups:
        raise ValueError(
            f"gemm: required rounded rows in {fp8} with scales {list(groups)}, "
            f"found {values.dtype} with scales {list(scale.shape)}; round them with the op "
            f"quantize, out_dtype {fp8} and groups of {group}, or pass x as it is"
        )
    return values, scale


def with_decoded_scales(
    group: int, fp8: str
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Scales rounded to powers of two, given as float32 to a kernel that multiplies by them."""
    quantize = bind_quantize_groups(group=group, out_dtype=fp8, is_ue8m0=True)

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, codes = quantize(x)
        return values, decode_scale(codes, "ue8m0")

    return kernel


def as_fnuz(data: torch.Tensor) -> torch.Tensor:
    """e4m3fn bits as e4m3fnuz, where they mean half: minus zero, NaN there, becomes zero."""
    bits = data.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz)


def _bind_mxfp8(
    request: GemmRequest,
    target: Target,
    weight: QuantizedWeight,
    tuned: TunedRows,
    split: SplitK | None,
) -> Product:
    data, after = weight.data.contiguous(), Epilogue(request)
    scale = weight.scale if weight.scale.dtype == torch.uint8 else encode_ue8m0(weight.scale)
    codes = scale.contiguous()
    quantize = bind_quantize_groups(group=32, out_dtype="fp8_e4m3fn", is_ue8m0=True)
    found = configurations("gemm_mxfp8", target)
    scale_n = {"SCALE_N": weight.format.block_n}
    stem = f"weight32{wide_suffix(request)}"

    def kernel(x: Rows, residual: torch.Tensor | None = None) -> Rows:
        values, x_codes = rounded_rows(x, quantize, "fp8_e4m3fn", 32)
        if x_codes.dtype != torch.uint8:
            raise ValueError(
                f"gemm: required scales as ue8m0 codes (uint8), found {x_codes.dtype}; round x "
                "with scales in ue8m0, or pass it as it is"
            )
        rows = values.shape[0]
        result = after.result(rows, values.device, residual)
        name = f"{stem}-small" if size_of(rows) == "small" else stem
        features = request.out_features
        if split is not None and split.covers(rows):
            split.launch((values, x_codes), (data, codes, codes), result)
        elif rows:
            config = tuned.choose(rows, found[name]) | scale_n
            _gemm_mxfp8_kernel[(grid_of(config, rows, features),)](
                values, x_codes, data, codes, *result.pointers, rows, features, request.k,
                values.stride(0), x_codes.stride(0), data.stride(0), codes.stride(0),
                *result.strides, **after.constants, **config,
            )  # fmt: skip
        return result.rows

    return kernel


def _bind_fp8_weight_only(
    request: GemmRequest, target: Target, weight: QuantizedWeight, split: SplitK | None
) -> Product:
    form, after = weight.format, Epilogue(request)
    data = weight.data.contiguous().view(torch.uint8)
    scale = decode_scale(weight.scale, form.scale_dtype).contiguous()
    if bool((data & 0x7F == 0x7F).any()):
        # The kernel would read such a code as a number.
        raise BindingError(
            f"Triton product for {request.label}",
            "FP8 weights that are numbers",
            "NaN among them",
            "load another checkpoint",
        )

    def kernel(x: torch.Tensor, residual: torch.Tensor | None = None) -> Rows:
        rows = x.shape[0]
        result = after.result(rows, x.device, residual)
        if split is not None and split.covers(rows):
            split.launch((x, x), (data, scale, scale), result)
        elif rows:
            config = fp8_weight_tiles(target, size_of(rows))
            _gemm_fp8_weight_kernel[(grid_of(config, rows, request.n),)](
                x, data, scale, result.y, result.residual, rows, request.n, request.k,
                x.stride(0), data.stride(0), scale.stride(0), *result.strides,
                GROUP_K=int(form.group_size or 0), HAS_RESIDUAL=after.has_residual, **config,
            )  # fmt: skip
        return result.y

    return kernel


def _bind_weight_only(
    request: GemmRequest,
    target: Target,
    weight: QuantizedWeight,
    tuned: TunedRows,
    split: SplitK | None,
) -> Product:
    form, after = weight.format, Epilogue(request)
    data, scale = weight.data.contiguous(), weight.scale.reshape(request.n, -1).contiguous()
    minimum = scale if weight.minimum is None else weight.minimum.contiguous()

    def kernel(x: torch.Tensor, residual: torch.Tensor | None = None) -> Rows:
        rows = x.shape[0]
        result = after.result(rows, x.device, residual)
        if split is not None and split.covers(rows):
            split.launch((x, x), (data, scale, minimum), result)
        elif rows:
            config = tuned.choose(rows, pick("gemm_weight_only", target, rows))
            _gemm_weight_only_kernel[(grid_of(config, rows, request.n),)](
                x, data, scale, minimum, result.y, result.residual, rows, request.n, request.k,
                x.stride(0), data.stride(0), scale.stride(0), *result.strides,
                BITS=form.bits, GROUP_K=int(form.group_size or 0),
                HAS_MINIMUM=weight.minimum is not None, HAS_RESIDUAL=after.has_residual, **config,
            )  # fmt: skip
        return result.y

    return kernel
