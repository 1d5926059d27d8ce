"""Binds the Triton products with quantised weights to requests: packs the weight once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.formats import QuantizedWeight, torch_dtype
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.ops.low_precision import decode_scale, encode_ue8m0
from hal.ops.weight_formats import WeightFormat
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.triton_kernels import _gemm_fp8_block_kernel, _gemm_mxfp8_kernel
from hal_kernels.gemm.triton_limits import form_of_weight, fp8_dtype, size_of, wide_suffix
from hal_kernels.gemm.triton_results import Epilogue, Rows, eight_bits, wide_rows
from hal_kernels.gemm.triton_split_k import SplitK, bind_split_k
from hal_kernels.gemm.triton_tiles import grid_of, target_of
from hal_kernels.gemm.triton_tuning import whole_shape_of
from hal_kernels.gemm.triton_variants import configurations
from hal_kernels.gemm.weight_only_kernels import _gemm_weight_only_kernel
from hal_kernels.gemm.weight_only_variants import form_constants, weight_only_tiles
from hal_kernels.gemm.widened_kernels import _gemm_fp8_widened_kernel
from hal_kernels.gemm.widened_variants import widened_tiles
from hal_kernels.quantize.triton import Quantizer, bind_quantize_groups, bind_quantize_rows
from hal_kernels.tuning.store import TunedRows, tuned_rows

Product = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Site:
    """What a product's binding rests on. split: of few rows, None where K stays whole."""

    request: GemmRequest
    target: Target
    weight: QuantizedWeight
    bias: torch.Tensor | None
    tuned: TunedRows
    split: SplitK | None


def bind_quantised(
    request: GemmRequest,
    device: DeviceSpec,
    kernel: str,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Product:
    """The product of a quantised weight by a kernel of the catalogue, with what follows it. Nothing
    is tuned for a fused one: tiles of a rounded result have to be whole groups wide. Few rows are
    split along K where `triton_limits` says so, but not while configurations are measured. Raises
    BindingError for a bias that the request does not name, or the reverse."""
    if (bias is not None) != request.has_bias:
        raise BindingError(
            f"Triton product for {request.label}",
            f"a bias as has_bias={request.has_bias} says",
            "none" if bias is None else f"one of {list(bias.shape)}",
            "bind what the request names",
        )
    shape = None if isinstance(request, FusedGemmRequest) else whole_shape_of(request, device)
    target, tuned = target_of(device), tuned_rows(shape, device)
    split = None if tuned.is_forced else bind_split_k(request, device, kernel, target, bias)
    site = _Site(request, target, weight, bias, tuned, split)
    if kernel == "gemm.mxfp8":
        return _bind_mxfp8(site)
    if kernel == "gemm.fp8_widened":
        return _bind_widened(site)
    if kernel == "gemm.fp8_block":
        return _bind_fp8_block(site, fp8_dtype(device))
    return _bind_weight_only(site, kernel)


def _bind_fp8_block(site: _Site, fp8: str) -> Product:
    form = site.weight.format
    group, is_ue8m0 = int(form.group_size or 0), rounds_to_ue8m0(site.request.weight_format)
    data, scale = site.weight.data.contiguous(), decode_scale(site.weight.scale, form.scale_dtype)
    if fp8 == "fp8_e4m3fnuz":
        data, scale = as_fnuz(data), scale * 2.0
    quantize = bind_quantize_groups(group=group, out_dtype=fp8, is_ue8m0=is_ue8m0)

    def rounded(x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return rounded_rows(x, quantize, fp8, group)

    stem = f"g{group}{wide_suffix(site.request)}"
    table = configurations("gemm_fp8_block", site.target)
    operands = (data, scale.contiguous())
    return _bind_two_fp8(site, _gemm_fp8_block_kernel, operands, rounded, _by_size(table, stem), {})


def _bind_widened(site: _Site) -> Product:
    """For a matrix unit without FP8. Raises BindingError for a weight that holds a NaN."""
    form, is_ue8m0 = site.weight.format, rounds_to_ue8m0(site.request.weight_format)
    group, bits = int(form.group_size or 0), site.weight.data.contiguous().view(torch.uint8)
    check_numbers(bits, op=site.request.label)
    scale = decode_scale(site.weight.scale, form.scale_dtype).contiguous()
    quantize = bind_quantize_rows(
        site.target.arch, group=group, out_dtype="fp8_e4m3fn", is_ue8m0=is_ue8m0
    )

    def rounded(x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        values, x_scale = rounded_rows(x, quantize, "fp8_e4m3fn", group)
        return values.view(torch.uint8), x_scale

    is_wide = bool(wide_suffix(site.request))
    tiles = {
        size: widened_tiles(site.target, group, size, is_wide=is_wide)
        for size in ("large", "small")
    }
    return _bind_two_fp8(site, _gemm_fp8_widened_kernel, (bits, scale), rounded, tiles, {})


def _bind_mxfp8(site: _Site) -> Product:
    weight = site.weight
    scale = weight.scale if weight.scale.dtype == torch.uint8 else encode_ue8m0(weight.scale)
    quantize = bind_quantize_groups(group=32, out_dtype="fp8_e4m3fn", is_ue8m0=True)

    def rounded(x: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        return rounded_rows(x, quantize, "fp8_e4m3fn", 32, reads_codes=True)

    stem = f"weight32{wide_suffix(site.request)}"
    found = _by_size(configurations("gemm_mxfp8", site.target), stem)
    operands = (weight.data.contiguous(), scale.contiguous())
    more = {"SCALE_N": weight.format.block_n}
    return _bind_two_fp8(site, _gemm_mxfp8_kernel, operands, rounded, found, more)


def _by_size(table: Mapping[str, Mapping[str, int]], stem: str) -> Mapping[str, Mapping[str, int]]:
    return {"large": table[stem], "small": table[f"{stem}-small"]}


def _bind_two_fp8(
    site: _Site,
    kernel: Any,
    operands: tuple[torch.Tensor, torch.Tensor],
    rounded: Callable[[Rows], tuple[torch.Tensor, torch.Tensor]],
    tiles: Mapping[str, Mapping[str, int]],
    constants: Mapping[str, int],
) -> Product:
    """A product of FP8 operands. operands: the weight and its scales; rounded: rows to values and
    scales; tiles: by size. A bias is a residual whose rows are all the same."""
    request, tuned, split, bias = site.request, site.tuned, site.split, site.bias
    after, (data, scale) = Epilogue(request, bias), operands
    features = request.out_features

    def product(x: Rows, residual: torch.Tensor | None = None) -> Rows:
        values, x_scale = rounded(x)
        rows = values.shape[0]
        result = after.result(rows, values.device, residual)
        if split is not None and split.covers(rows):
            split.launch((values, x_scale), (data, scale, scale), result)
        elif rows:
            config = {**tuned.choose(rows, tiles[size_of(rows)]), **constants}
            kernel[(grid_of(config, rows, features),)](
                values, x_scale, data, scale, *result.pointers, rows, features, request.k,
                values.stride(0), x_scale.stride(0), data.stride(0), scale.stride(0),
                *result.strides, **after.constants, **config,
            )  # fmt: skip
        return result.rows

    return product


def rounded_rows(
    x: Rows,
    quantize: Quantizer,
    fp8: str,
    group: int,
    *,
    reads_codes: bool = False,
    op: str = "gemm",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of x as `rounded_pair` has them, rounded here unless it comes rounded."""
    pair = quantize(x) if isinstance(x, torch.Tensor) else x
    return rounded_pair(pair, fp8, group, reads_codes=reads_codes, op=op)


def rounded_pair(
    pair: tuple[torch.Tensor, torch.Tensor],
    fp8: str,
    group: int,
    *,
    reads_codes: bool = False,
    op: str = "gemm",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded rows as a kernel reads them: values [M, K] in fp8, scales [M, K / group].

    Scales are float32, or uint8 codes of ue8m0 for a kernel that reads_codes; to another one codes
    are given decoded. Raises ValueError for values of another type, or scales that are not one a
    row and group, or of another dtype.
    """
    values, scale = pair
    groups = (values.shape[0], -(-values.shape[1] // group))
    read = (torch.uint8,) if reads_codes else (torch.float32, torch.uint8)
    if values.dtype != eight_bits(fp8) or scale.shape != groups or scale.dtype not in read:
        kinds = "ue8m0 codes (uint8)" if reads_codes else "float32 or ue8m0 codes (uint8)"
        raise ValueError(
            f"{op}: required rounded rows in {fp8} with scales {list(groups)} in {kinds}, "
            f"found {values.dtype} with scales {list(scale.shape)} in {scale.dtype}; round them "
            f"with the op quantize, out_dtype {fp8}, groups of {group} and scales in "
            f"{'ue8m0' if reads_codes else 'float32 or ue8m0'}, or pass x as it is"
        )
    is_decoded = scale.dtype == torch.uint8 and not reads_codes
    return values, decode_scale(scale, "ue8m0") if is_decoded else scale


def rounds_to_ue8m0(form: WeightFormat) -> bool:
    """Whether the scales of a format's rounded rows are powers of two."""
    return "ue8m0" in form.activation or form.activation.startswith("mxfp8")


def as_fnuz(data: torch.Tensor) -> torch.Tensor:
    """e4m3fn bits as e4m3fnuz, where they mean half: minus zero, NaN there, becomes zero."""
    bits = data.view(torch.uint8)
    return torch.where(bits == 0x80, 0, bits).to(torch.uint8).view(torch.float8_e4m3fnuz)


def _bind_weight_only(site: _Site, kernel: str) -> Product:
    """A weight that alone is quantised; its rows stay as they are."""
    request, weight, tuned, split = site.request, site.weight, site.tuned, site.split
    data, scale, name = weight.data.contiguous(), weight.scale, form_of_weight(request, kernel)
    if kernel == "gemm.fp8_weight_only":
        data, scale = data.view(torch.uint8), decode_scale(scale, weight.format.scale_dtype)
        check_numbers(data, op=request.label)
    scale = scale.reshape(scale.shape[0], -1).contiguous()
    minimum = scale if weight.minimum is None else weight.minimum.contiguous()
    if weight.format.element == "int":
        scale, minimum = (
            as_compiled(one, weight.format, op=request.label) for one in (scale, minimum)
        )
    after, features = Epilogue(request), request.out_features
    is_gated = request.epilogue == "silu_gated"
    tiles = {
        size: weight_only_tiles(site.target, name, size, is_gated=is_gated)
        for size in ("large", "small")
    }
    form = {**form_constants(name), **after.constants, "HAS_BIAS": site.bias is not None}
    bias = scale if site.bias is None else site.bias

    def product(x: Rows, residual: torch.Tensor | None = None) -> Rows:
        x = wide_rows(x, op=request.label)
        rows = x.shape[0]
        result = after.result(rows, x.device, residual)
        if split is not None and split.covers(rows):
            split.launch((x, x), (data, scale, minimum), result)
        elif rows:
            config = tuned.choose(rows, tiles[size_of(rows)])
            _gemm_weight_only_kernel[(grid_of(config, rows, features),)](
                x, data, scale, minimum, bias, *result.pointers, rows, features, request.k,
                x.stride(0), data.stride(0), scale.stride(0), *result.strides, **form, **config,
            )  # fmt: skip
        return result.rows

    return product


def as_compiled(values: torch.Tensor, form: WeightFormat, *, op: str) -> torch.Tensor:
    """Scales or minima of an integer weight in the dtype that code was compiled for: float16 of
    groups, float32 of rows. Raises BindingError where that does not hold them exactly: float16
    those of a bfloat16 checkpoint below 2**-17 or above 65,504."""
    name = "float16" if form.group_size else "float32"
    found = values.to(torch_dtype(name))
    if not bool(((found.to(values.dtype) == values) | values.isnan()).all()):
        raise BindingError(
            f"Triton product for {op}",
            f"scales of {'groups' if form.group_size else 'rows'} that {name} holds exactly",
            f"others among those in {values.dtype}",
            f"quantise the weight with scales in {name}",
        )
    return found


def check_numbers(bits: torch.Tensor, *, op: str) -> None:
    """Raises BindingError for a NaN among e4m3 codes, which the kernel would read as a number."""
    if bool((bits & 0x7F == 0x7F).any()):
        raise BindingError(
            f"Triton product for {op}",
            "FP8 weights that are numbers",
            "NaN among them",
            "load another checkpoint",
        )
