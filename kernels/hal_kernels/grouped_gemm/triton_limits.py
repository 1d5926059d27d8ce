"""Which products per expert the Triton kernels serve, and with which. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.weight_formats import WeightFormat
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.gemm.triton_limits import KernelChoice, fp8_dtype
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.grouped_gemm.triton_variants import FEW_ROWS

_WIDE = ("bfloat16", "float16")


def choose_kernel(request: GroupedGemmRequest, device: DeviceSpec) -> KernelChoice | Reason:
    """The kernel for a request, or what is not written yet."""
    form = request.weight_format
    if request.dtype not in _WIDE:
        return not_written("grouped_gemm", "dtype", " or ".join(_WIDE), request.dtype)
    if request.epilogue not in ("none", "silu_gated"):
        return not_written("grouped_gemm", "epilogue", "none or silu_gated", request.epilogue)
    suffix = "-gated" if request.epilogue == "silu_gated" else ""
    # The tiles of the most tokens of the range: a plan asks for each range of its own.
    rows = -(-request.tokens.high * request.experts_per_token // request.num_experts)
    size = "small" if rows <= FEW_ROWS else "large"
    if form.is_dense:
        if form.name != request.dtype:
            return not_written("grouped_gemm.dense", "weight", request.dtype, form.name)
        return KernelChoice("grouped_gemm.dense", request.dtype, f"{size}{suffix}")
    if request.dtype != "bfloat16":
        # Of quantised weights no code is compiled whose results are in float16.
        return not_written("grouped_gemm", "dtype", "bfloat16 for quantised weights", request.dtype)
    if form.element == "fp4_e2m1" and form.activation == "mxfp8_group32":
        if request.k % 32:  # a row of the weight is read 16 bytes at a time
            return not_written("grouped_gemm.mxfp4", "k", "a multiple of 32", str(request.k))
        return KernelChoice("grouped_gemm.mxfp4", fp8_dtype(device), f"{size}{suffix}")
    is_block = form.block_n == form.group_size and form.group_size in (32, 128)
    if form.element == "fp8_e4m3fn" and is_block and form.activation != "float":
        config = f"g{form.group_size}-{size}{suffix}"
        kernel = "fp8_widened" if device.arch in WIDENED_UNITS else "fp8_block"
        return KernelChoice(f"grouped_gemm.{kernel}", fp8_dtype(device), config)
    if form.activation == "float":
        stored = _weight_only_form(form)
        if stored:
            return KernelChoice(
                "grouped_gemm.weight_only", request.dtype, f"{stored}-{size}{suffix}"
            )
    wanted = "dense, FP8 blocks or MXFP4"
    return not_written("grouped_gemm", "weight format", wanted, f"{form.name} ({form.activation})")


def _weight_only_form(form: WeightFormat) -> str:
    """How the weight of a product is stored whose rows stay as they are, as configurations have it;
    "" for what no kernel reads."""
    if form.element == "fp4_e2m1" and form.scale_dtype == "ue8m0":
        return "mxfp4"
    if form.element != "fp8_e4m3fn" or form.block_n != form.group_size:
        return ""
    if form.group_size == 32:
        return "g32" if form.scale_dtype == "ue8m0" else ""
    return "g128" if form.group_size == 128 else ""


def not_supported_reasons(
    request: GroupedGemmRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if a kernel serves whose machine code is of an allowed tier."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        return [choice]
    return evidence_reasons(
        choice.kernel, device, dtype=choice.dtype, config=choice.config, allowed=allowed
    )
