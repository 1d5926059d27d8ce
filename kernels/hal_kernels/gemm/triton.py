"""Binds the Triton products to requests: packs the weight once, picks a configuration per call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import triton

from hal.device import DeviceSpec
from hal.errors import BindingError
from hal.ops.formats import QuantizedWeight, torch_dtype
from hal.ops.gemm import GemmRequest
from hal.ops.low_precision import decode_scale, encode_ue8m0
from hal.reasons import Reason
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.fp8_weight_kernels import _gemm_fp8_weight_kernel
from hal_kernels.gemm.triton_kernels import (
    _gemm_fp8_block_kernel,
    _gemm_kernel,
    _gemm_mxfp8_kernel,
    _gemm_weight_only_kernel,
    _split_k_kernel,
)
from hal_kernels.gemm.triton_limits import choose_kernel, fp8_dtype, size_of
from hal_kernels.gemm.triton_stream_k import bind_stream_k
from hal_kernels.gemm.triton_tuning import shape_of
from hal_kernels.gemm.triton_variants import configurations, fp8_weight_tiles
from hal_kernels.quantize.triton import bind_quantize_groups
from hal_kernels.tuning.store import TunedRows, tuned_rows

Product = Callable[[torch.Tensor], torch.Tensor]
_EPILOGUES = {"none": 0, "silu": 1, "silu_gated": 2}


def bind(
    request: GemmRequest,
    device: DeviceSpec,
    *,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
) -> Product:
    """kernel(x[T, K]) -> y[T, N]. Raises BindingError for what `triton_limits` rejects."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        raise BindingError(
            f"Triton product for {request.label}: {choice.what}",
            choice.required,
            choice.found,
            "select another",
        )
    target, tuned = target_of(device), tuned_rows(shape_of(request, device), device)
    if isinstance(weight, torch.Tensor):
        return _bind_dense(request, device, weight, bias, tuned)
    if choice.kernel == "gemm.mxfp8":
        return _bind_mxfp8(request, target, weight, tuned)
    if choice.kernel == "gemm.fp8_block":
        return _bind_fp8_block(request, target, weight, fp8_dtype(device), tuned)
    if choice.kernel == "gemm.fp8_weight_only":
        return _bind_fp8_weight_only(request, target, weight)
    return _bind_weight_only(request, target, weight, tuned)


def target_of(device: DeviceSpec) -> Target:
    """The architecture of a device as a compile target."""
    warp = int(device.attributes.get("warp_size", 32))
    return Target(device.arch, "hip" if device.arch.startswith("gfx") else "cuda", warp)


def _pick(table: str, target: Target, rows: int, k: int = 0) -> dict[str, int]:
    """The configuration for so many rows; splits of K only where K is long."""
    found: Mapping[str, Mapping[str, int]] = configurations(table, target)
    return dict(found[size_of(rows, k)])


def _result(request: GemmRequest, x: torch.Tensor) -> torch.Tensor:
    """Memory for the product's rows, in the dtype that the request asks for."""
    dtype = torch_dtype(request.out_dtype or request.dtype)
    return torch.empty((x.shape[0], request.n), dtype=dtype, device=x.device)


def _grid(config: Mapping[str, int], rows: int, features: int) -> int:
    return -(-rows // config["BLOCK_M"]) * -(-features // config["BLOCK_N"])


def _bind_dense(
    request: GemmRequest,
    device: DeviceSpec,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuned: TunedRows,
) -> Product:
    packed, target = weight.contiguous(), target_of(device)
    stream_k = bind_stream_k(request, device, target, weight=packed, bias=bias)
    features = request.out_features
    out_dtype = torch_dtype(request.out_dtype or request.dtype)
    epilogue = _EPILOGUES[request.epilogue]
    table = "gemm_gated" if request.epilogue == "silu_gated" else "gemm"
    halves = 2 if request.epilogue == "silu_gated" else 1

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = torch.empty((rows, features), dtype=out_dtype, device=x.device)
        if not rows or (stream_k is not None and not tuned.covers(rows) and stream_k(x, y)):
            return y
        config = tuned.choose(rows, _pick(table, target, rows, request.k))
        splits = config["SPLIT_K"]
        shape = (splits * halves, rows, features) if splits > 1 else (1,)
        part = torch.empty(shape, dtype=torch.float32, device=x.device)
        bias_or_any = packed if bias is None else bias
        _gemm_kernel[(_grid(config, rows, features), splits)](
            x, packed, bias_or_any, y, part, rows, features, request.k,
            x.stride(0), packed.stride(0), y.stride(0),
            HAS_BIAS=bias is not None, EPILOGUE=epilogue, **config,
        )  # fmt: skip
        if splits > 1:
            block = min(1024, triton.next_power_of_2(features))
            _split_k_kernel[(rows, triton.cdiv(features, block))](
                part, bias_or_any, y, rows, features, y.stride(0),
                BLOCK_N=block, SPLIT_K=splits, HAS_BIAS=bias is not None, EPILOGUE=epilogue,
            )  # fmt: skip
        return y

    return kernel


def _bind_fp8_block(
    request: GemmRequest, target: Target, weight: QuantizedWeight, fp8: str, tuned: TunedRows
) -> Product:
    form = weight.format
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

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        values, x_scale = quantize(x)
        y = _result(request, x)
        name = f"g{group}-small" if size_of(rows) == "small" else f"g{group}"
        config = tuned.choose(rows, found[name])
        if rows:
            _gemm_fp8_block_kernel[(_grid(config, rows, request.n),)](
                values, x_scale, data, scale, y, rows, request.n, request.k,
                values.stride(0), x_scale.stride(0), data.stride(0), scale.stride(0), y.stride(0),
                **config,
            )  # fmt: skip
        return y

    return kernel


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
    request: GemmRequest, target: Target, weight: QuantizedWeight, tuned: TunedRows
) -> Product:
    data = weight.data.contiguous()
    scale = weight.scale if weight.scale.dtype == torch.uint8 else encode_ue8m0(weight.scale)
    codes = scale.contiguous()
    quantize = bind_quantize_groups(group=32, out_dtype="fp8_e4m3fn", is_ue8m0=True)
    default = dict(configurations("gemm_mxfp8", target)["weight32"])
    scale_n = {"SCALE_N": weight.format.block_n}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        values, x_codes = quantize(x)
        y = _result(request, x)
        config = tuned.choose(rows, default) | scale_n
        if rows:
            _gemm_mxfp8_kernel[(_grid(config, rows, request.n),)](
                values, x_codes, data, codes, y, rows, request.n, request.k,
                values.stride(0), x_codes.stride(0), data.stride(0), codes.stride(0), y.stride(0),
                **config,
            )  # fmt: skip
        return y

    return kernel


def _bind_fp8_weight_only(request: GemmRequest, target: Target, weight: QuantizedWeight) -> Product:
    form = weight.format
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

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = _result(request, x)
        config = fp8_weight_tiles(target, size_of(rows))
        if rows:
            _gemm_fp8_weight_kernel[(_grid(config, rows, request.n),)](
                x, data, scale, y, rows, request.n, request.k,
                x.stride(0), data.stride(0), scale.stride(0), y.stride(0),
                GROUP_K=int(form.group_size or 0), **config,
            )  # fmt: skip
        return y

    return kernel


def _bind_weight_only(
    request: GemmRequest, target: Target, weight: QuantizedWeight, tuned: TunedRows
) -> Product:
    form = weight.format
    data, scale = weight.data.contiguous(), weight.scale.reshape(request.n, -1).contiguous()
    minimum = scale if weight.minimum is None else weight.minimum.contiguous()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        y = _result(request, x)
        config = tuned.choose(rows, _pick("gemm_weight_only", target, rows))
        if rows:
            _gemm_weight_only_kernel[(_grid(config, rows, request.n),)](
                x, data, scale, minimum, y, rows, request.n, request.k,
                x.stride(0), data.stride(0), scale.stride(0), y.stride(0),
                BITS=form.bits, GROUP_K=int(form.group_size or 0),
                HAS_MINIMUM=weight.minimum is not None, **config,
            )  # fmt: skip
        return y

    return kernel
