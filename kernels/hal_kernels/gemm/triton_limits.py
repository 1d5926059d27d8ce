"""Which products the Triton kernels serve, and with which of them. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hal.device import DeviceSpec
from hal.ops.fused_gemm import FusedGemmRequest
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_of, evidence_reasons, not_written

_WIDE = ("bfloat16", "float16")
FEW_ROWS = 16  # rows up to which the weight's bytes decide, and splits of K fill the device
_LEAST_SPLIT_K = 2048  # columns below which a split would leave too little to each


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel of the catalogue, the operand type it claims and the family of configurations."""

    kernel: str
    dtype: str
    config: str = ""


def size_of(rows: int, k: int = 0) -> str:
    """The configuration for so many rows: "large", "small", or "split" where `k` is long."""
    if rows > FEW_ROWS:
        return "large"
    return "split" if k >= _LEAST_SPLIT_K else "small"


def gated_suffix(request: GemmRequest) -> str:
    """What the names of configurations of gated products have more."""
    return "-gated" if request.epilogue == "silu_gated" else ""


def wide_suffix(request: GemmRequest) -> str:
    """Of the configurations whose tiles suit a gated product, and a rounded result: these are whole
    groups wide."""
    is_rounded = isinstance(request, FusedGemmRequest) and request.out_group_size
    return "-gated" if is_rounded else gated_suffix(request)


def dense_suffix(request: GemmRequest) -> str:
    """The form of a dense product, as the names of its configurations have it."""
    return gated_suffix(request) or "-bias" * request.has_bias


def choose_kernel(request: GemmRequest, device: DeviceSpec) -> KernelChoice | Reason:
    """The kernel for a request, in the configuration of the most tokens of its range (a plan asks
    for each range of its own), or what is not written yet."""
    form, rows = request.weight_format, request.tokens.high
    if request.dtype not in _WIDE:
        return not_written("gemm", "dtype", " or ".join(_WIDE), request.dtype)
    if form.is_dense:
        if form.name != request.dtype:
            return not_written("gemm.dense", "weight", request.dtype, form.name)
        if request.out_dtype not in ("", request.dtype, "float32"):
            return not_written("gemm.dense", "out_dtype", request.dtype, request.out_dtype)
        config = size_of(rows, request.k) + dense_suffix(request)
        return KernelChoice("gemm.dense", request.dtype, config)
    if request.has_bias:
        return not_written("gemm", "bias", "none for quantised weights", "a bias")
    if request.dtype != "bfloat16":
        # Of quantised weights no code is compiled whose rows or results are in float16.
        return not_written("gemm", "dtype", "bfloat16 for quantised weights", request.dtype)
    if request.out_dtype not in ("", request.dtype, "float32"):
        wanted = f"{request.dtype} or float32"
        return not_written("gemm", "out_dtype", wanted, request.out_dtype)
    if form.element == "fp8_e4m3fn" and form.activation.startswith(("fp8_group", "mxfp8")):
        return _block_scaled(request, device)
    if request.epilogue != "none":
        found = f"{request.epilogue} for {form.name}"
        return not_written("gemm", "epilogue", "none unless both operands are FP8 blocks", found)
    if form.element == "fp8_e4m3fn" and form.activation == "float":
        return _float_activations(request)
    if form.element == "int" and form.activation == "float":
        kind = {(8, 0): "w8", (4, 32): "w4g32"}.get((form.bits, form.group_size or 0))
        if kind is not None:
            suffix = "" if form.is_symmetric else "-asym"
            return KernelChoice("gemm.weight_only", "bfloat16", f"{size_of(rows)}-{kind}{suffix}")
        return not_written("gemm.weight_only", "format", "int8_channel or int4_g32", form.name)
    return not_written("gemm", "weight format", "dense, FP8 blocks, int8 or int4", form.name)


def _block_scaled(request: GemmRequest, device: DeviceSpec) -> KernelChoice | Reason:
    form, fp8 = request.weight_format, fp8_dtype(device)
    if request.epilogue == "silu":
        wanted = "none or silu_gated for FP8 blocks"
        return not_written("gemm.fp8_block", "epilogue", wanted, request.epilogue)
    suffix = gated_suffix(request) + "-small" * (size_of(request.tokens.high) == "small")
    if form.group_size == 32 and form.scale_dtype == "ue8m0":
        found = evidence_of("gemm.mxfp8", device, fp8, "weight32")
        if found is not None and found.tier == "native":
            return KernelChoice("gemm.mxfp8", fp8, f"weight32{suffix}")
    if form.group_size in (32, 128) and form.block_n == form.group_size:
        return KernelChoice("gemm.fp8_block", fp8, f"g{form.group_size}{suffix}")
    return not_written("gemm.fp8_block", "blocks", "32x32 or 128x128", form.name)


def _float_activations(request: GemmRequest) -> KernelChoice | Reason:
    """FP8 weights in square blocks that meet the activations as they are."""
    form = request.weight_format
    if form.group_size not in (32, 128) or form.block_n != form.group_size:
        return not_written("gemm.fp8_weight_only", "blocks", "32x32 or 128x128", form.name)
    config = f"{size_of(request.tokens.high)}-g{form.group_size}"
    return KernelChoice("gemm.fp8_weight_only", request.dtype, config)


def fp8_dtype(device: DeviceSpec) -> str:
    """The e4m3 type of an architecture: gfx94x multiplies the fnuz one."""
    return "fp8_e4m3fnuz" if device.arch.startswith("gfx94") else "fp8_e4m3fn"


def not_supported_reasons(
    request: GemmRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if a kernel serves whose machine code is of an allowed tier."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        return [choice]
    return evidence_reasons(
        choice.kernel, device, dtype=choice.dtype, config=choice.config, allowed=allowed
    )
