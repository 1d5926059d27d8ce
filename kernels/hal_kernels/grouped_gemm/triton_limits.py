"""Which products per expert the Triton kernels serve, and with which. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.weight_formats import WeightFormat
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import not_written
from hal_kernels.gemm.triton_limits import KernelChoice, fp8_dtype, reasons_against
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.grouped_gemm.integer_variants import INTEGER_FORMATS
from hal_kernels.grouped_gemm.round_variants import ROUND_CONFIG, rounds_in_integers
from hal_kernels.grouped_gemm.split_k_schedule import SplitSchedule, schedule_of
from hal_kernels.grouped_gemm.triton_variants import FEW_ROWS

_WIDE = ("bfloat16", "float16")
_SERVED = (
    "dense, FP8 in blocks of 128 or 32 (32 with ue8m0 scales where the activations stay as they "
    f"are), mxfp4, mxfp4_a8, or {', '.join(INTEGER_FORMATS)}"
)


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
    if form.element == "int" and form.activation == "float":
        return _integer(request, f"{size}{suffix}")
    if request.dtype != "bfloat16":
        # Of FP8 and FP4 weights no code is compiled whose results are in float16.
        wanted = "bfloat16 for FP8 and FP4 weights"
        return not_written("grouped_gemm", "dtype", wanted, request.dtype)
    if form.element == "fp4_e2m1" and form.activation == "mxfp8_group32":
        if request.k % 32:  # a row of the weight is read 16 bytes at a time
            return not_written("grouped_gemm.mxfp4", "k", "a multiple of 32", str(request.k))
        if rounds_in_integers(device.arch):
            return KernelChoice("grouped_gemm.weight_only", "bfloat16", f"mxfp4-{size}{suffix}")
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
    found = f"{form.name} ({form.activation})"
    return not_written("grouped_gemm", "weight format", _SERVED, found)


def _integer(request: GroupedGemmRequest, size: str) -> KernelChoice | Reason:
    form = request.weight_format
    name = INTEGER_FORMATS.get(form.name)
    if name is None:
        wanted = ", ".join(INTEGER_FORMATS)
        return not_written("grouped_gemm.integer", "format", wanted, form.name)
    return KernelChoice("grouped_gemm.integer", request.dtype, f"{name}-{size}")


def split_of(
    request: GroupedGemmRequest, device: DeviceSpec, choice: KernelChoice
) -> SplitSchedule | None:
    """How K is cut for few rows, None where it stays whole. choice: the whole product."""
    return schedule_of(request, device, choice.kernel, choice.dtype, choice.config)


def choose_kernels(
    request: GroupedGemmRequest, device: DeviceSpec
) -> tuple[KernelChoice, ...] | Reason:
    """The kernels that a request launches at the most tokens of its range: one, or parts along K
    and their sum, or what is not written yet."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        return choice
    rounds: tuple[KernelChoice, ...] = ()
    if _is_decoded(request, choice):
        rounds = (KernelChoice("grouped_gemm.round_rows", "", ROUND_CONFIG),)
    split = split_of(request, device, choice)
    if split is None or request.tokens.high * request.experts_per_token > split.most_rows:
        return (*rounds, choice)
    return (
        *rounds,
        KernelChoice("grouped_gemm.split_k", split.dtype, split.config),
        KernelChoice("grouped_gemm.split_k_sum", "", split.sum_config),
    )


def _is_decoded(request: GroupedGemmRequest, choice: KernelChoice) -> bool:
    """Whether rows are rounded and decoded again, for a product of 16-bit operands."""
    is_wide = choice.kernel == "grouped_gemm.weight_only"
    return is_wide and request.weight_format.activation != "float"


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
    """Empty if kernels serve whose machine code is of an allowed tier."""
    choices = choose_kernels(request, device)
    if isinstance(choices, Reason) or choices[0].kernel != "grouped_gemm.round_rows":
        return reasons_against(choices, device, allowed)
    # Native code of 16 bits, for what claims FP8: it is emulated by that.
    reasons = reasons_against(choices, device, ("native",))
    if "emulated" in allowed:
        return reasons
    hardware = Reason(
        what="grouped_gemm: rows of FP8",
        required="a matrix unit that multiplies them",
        found=f"{device.arch}, where they are decoded to 16 bits",
        kind=ReasonKind.HARDWARE,
    )
    return [hardware, *reasons]
