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
from hal_kernels.gemm.dense_forms import (
    FEW_ROWS,
    dense_suffix,
    gated_suffix,
    known_target,
    size_of,
    units_of,
    whole_size,
)
from hal_kernels.gemm.split_k_schedule import splits_of
from hal_kernels.gemm.split_k_tuning import split_class
from hal_kernels.gemm.split_k_variants import split_k_tiles
from hal_kernels.gemm.stream_k_limits import bind_schedule
from hal_kernels.gemm.triton_variants import WIDENED_UNITS
from hal_kernels.tuning.shapes import ShapeClass, shape_class
from hal_kernels.tuning.store import find_configuration

__all__ = [
    "DENSE_SPLITS",
    "FEW_ROWS",
    "KernelChoice",
    "choose_kernel",
    "choose_kernels",
    "dense_class",
    "dense_suffix",
    "form_of_weight",
    "fp8_dtype",
    "gated_suffix",
    "not_supported_reasons",
    "reasons_against",
    "size_of",
    "split_of",
    "wide_suffix",
]

_WIDE = ("bfloat16", "float16")
DENSE_SPLITS = 4  # of a dense product, in every table of configurations
# Bits, and columns of a scale.
_INTEGERS = {
    (8, 0): "w8", (8, 32): "w8g32", (4, 32): "w4g32", (4, 64): "w4g64", (4, 128): "w4g128",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel of the catalogue, the operand type it claims and the family of configurations."""

    kernel: str
    dtype: str
    config: str = ""


def wide_suffix(request: GemmRequest) -> str:
    """Of the configurations whose tiles suit a gated product, and a rounded result: these are whole
    groups wide."""
    is_rounded = isinstance(request, FusedGemmRequest) and request.out_group_size
    return "-gated" if is_rounded else gated_suffix(request)


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
        suffix = dense_suffix(request)
        if request.out_dtype == "float32" != request.dtype and size_of(rows, request.k) != "split":
            if suffix:
                return _no_float32("gemm.dense", suffix)
            suffix = "-float32"
        table = "gemm_gated" if gated_suffix(request) else "gemm"
        size = whole_size(request, device, rows, table=table, kernel="gemm.dense", suffix=suffix)
        return KernelChoice("gemm.dense", request.dtype, size + suffix)
    if request.dtype != "bfloat16" and form.element != "int":
        # Of FP8 weights no code is compiled whose rows or results are in float16.
        return not_written("gemm", "dtype", "bfloat16 for FP8 weights", request.dtype)
    if request.out_dtype not in ("", request.dtype, "float32"):
        wanted = f"{request.dtype} or float32"
        return not_written("gemm", "out_dtype", wanted, request.out_dtype)
    if form.element == "fp8_e4m3fn" and form.activation.startswith(("fp8_group", "mxfp8")):
        return _block_scaled(request, device)
    if form.activation == "float" and form.element in ("int", "fp8_e4m3fn"):
        return _weight_only(request)
    return not_written("gemm", "weight format", "dense, FP8 blocks, int8 or int4", form.name)


def _no_float32(kernel: str, suffix: str) -> Reason:
    found = suffix.removeprefix("-")
    return not_written(kernel, "what follows", "nothing in float32 results", found)


def _weight_only(request: GemmRequest) -> KernelChoice | Reason:
    """A quantised weight that meets the activations as they are."""
    form = request.weight_format
    if form.element == "int":
        kernel = "gemm.weight_only"
        wanted = "int8_channel, int8_g32, or int4 in groups of 32, 64 or 128"
        is_read = (form.bits, form.group_size or 0) in _INTEGERS
    else:
        kernel, wanted = "gemm.fp8_weight_only", "32x32 or 128x128"
        is_read = form.group_size in (32, 128) and form.block_n == form.group_size
    if not is_read:
        return not_written(kernel, "format", wanted, form.name)
    suffix = dense_suffix(request)
    if request.out_dtype == "float32":
        if suffix:
            return _no_float32(kernel, suffix)
        suffix = "-float32"
    kind = form_of_weight(request, kernel).removeprefix("fp8")
    config = f"{size_of(request.tokens.high)}-{kind}{suffix}"
    return KernelChoice(kernel, request.dtype, config)


def form_of_weight(request: GemmRequest, kernel: str) -> str:
    """The form of a quantised weight, as the names of the split product's configurations have it.
    kernel: of the whole product."""
    form = request.weight_format
    if kernel == "gemm.mxfp8":
        return "weight32"
    if kernel in ("gemm.fp8_block", "gemm.fp8_weight_only"):
        return ("fp8" if kernel == "gemm.fp8_weight_only" else "") + f"g{form.group_size}"
    offset = "" if form.is_symmetric else "-zero" if form.has_zeros else "-asym"
    return _INTEGERS[form.bits, form.group_size or 0] + offset


def split_of(
    request: GemmRequest, device: DeviceSpec, kernel: str
) -> tuple[KernelChoice, int] | None:
    """The split product of few rows of a request, and its number of parts; None where K stays
    whole: the tiles keep the device busy, or no native code is there. kernel: of the whole product.
    """
    target, units = known_target(device), units_of(device)
    if target is None or not units or kernel in ("gemm.dense", "gemm.fp8_widened"):
        return None
    form = form_of_weight(request, kernel)
    is_eight_bits = kernel in ("gemm.mxfp8", "gemm.fp8_block")
    dtype = fp8_dtype(device) if is_eight_bits else request.dtype
    choice = KernelChoice("gemm.split_k", dtype, form + gated_suffix(request))
    found = evidence_of(choice.kernel, device, choice.dtype, choice.config)
    if found is None or found.tier != "native":
        return None
    block = split_k_tiles(target, form, is_gated=request.epilogue == "silu_gated")["BLOCK_N"]
    splits = splits_of(-(-request.out_features // block), request.k, units)
    if splits == 1:
        return None
    if isinstance(request, FusedGemmRequest):
        return choice, splits  # of which nothing is tuned
    shape = split_class(request, choice.dtype, choice.config)
    kept = find_configuration(choice.kernel, device, str(shape))
    return choice, splits if kept is None else kept.trial.configuration["SPLIT_K"]


def choose_kernels(request: GemmRequest, device: DeviceSpec) -> tuple[KernelChoice, ...] | Reason:
    """The kernels that a request launches at the most tokens of its range: one, or parts and their
    sum, or what is not written yet."""
    choice = choose_kernel(request, device)
    if isinstance(choice, Reason):
        return choice
    splits, parts = 1, choice
    if choice.kernel == "gemm.dense":
        kept = find_configuration("gemm.dense", device, str(dense_class(request)))
        if kept is not None:
            splits = kept.trial.configuration["SPLIT_K"]
            parts = choice = _kept_form(request, choice, splits)
        elif (shared := _shared_out(request, device)) is not None:
            return shared
        else:
            splits = DENSE_SPLITS if choice.config.startswith("split") else 1
    elif request.tokens.high <= FEW_ROWS:
        parts, splits = split_of(request, device, choice.kernel) or (choice, 1)
    if splits == 1:
        return (choice,)
    suffix, stored = dense_suffix(request), request.out_dtype or request.dtype
    if stored == "float32" and suffix:
        return _no_float32("gemm.split_k_sum", suffix)
    config = f"split{splits}{suffix or '-plain'}" + f"-{stored}" * (stored != "bfloat16")
    return parts, KernelChoice("gemm.split_k_sum", "", config)


def dense_class(request: GemmRequest) -> ShapeClass:
    """The class of a dense product at the most tokens of its range, by which configurations are
    kept. What is stored in float32 is tuned as what is not."""
    form = dense_suffix(request).removeprefix("-") or "plain"
    return shape_class(request.dtype, form, request.tokens.high, {"n": request.n, "k": request.k})


def _kept_form(request: GemmRequest, choice: KernelChoice, splits: int) -> KernelChoice:
    """The form of a dense product in a kept configuration, which may cut K where the default does
    not, or the reverse. Cut, it stores parts, whatever becomes of their sum."""
    if request.tokens.high > FEW_ROWS:
        return choice
    suffix = dense_suffix(request)
    if splits == 1 and request.out_dtype == "float32" != request.dtype:
        suffix += "-float32"
    return KernelChoice(choice.kernel, choice.dtype, ("small" if splits == 1 else "split") + suffix)


def _shared_out(
    request: GemmRequest, device: DeviceSpec
) -> tuple[KernelChoice, KernelChoice] | None:
    """The kernels of a dense product that is shared out evenly; None for whole tiles."""
    bound = bind_schedule(request, device)
    share = None if bound is None else bound.share(request.tokens.high)
    if share is None:
        return None
    return (
        KernelChoice("gemm.stream_k", request.dtype, share.config),
        KernelChoice("gemm.stream_k_fix_up", "", share.fix_up),
    )


def _block_scaled(request: GemmRequest, device: DeviceSpec) -> KernelChoice | Reason:
    form, fp8 = request.weight_format, fp8_dtype(device)
    follows = [
        name
        for name, is_asked in (
            (request.epilogue.removeprefix("silu_"), request.epilogue != "none"),
            ("bias", request.has_bias),
            ("float32", request.out_dtype == "float32"),
        )
        if is_asked
    ]
    if len(follows) > 1:
        wanted = "one of an activation, a bias and float32 results"
        return not_written("gemm.fp8_block", "what follows", wanted, " and ".join(follows))
    suffix = "".join(f"-{name}" for name in follows)
    suffix += "-small" * (size_of(request.tokens.high) == "small")
    if form.group_size == 32 and form.scale_dtype == "ue8m0":
        found = evidence_of("gemm.mxfp8", device, fp8, "weight32")
        if found is not None and found.tier == "native":
            return KernelChoice("gemm.mxfp8", fp8, f"weight32{suffix}")
    if form.group_size in (32, 128) and form.block_n == form.group_size:
        kernel = "gemm.fp8_widened" if device.arch in WIDENED_UNITS else "gemm.fp8_block"
        return KernelChoice(kernel, fp8, f"g{form.group_size}{suffix}")
    return not_written("gemm.fp8_block", "blocks", "32x32 or 128x128", form.name)


def fp8_dtype(device: DeviceSpec) -> str:
    """The e4m3 type of an architecture: gfx94x multiplies the fnuz one."""
    return "fp8_e4m3fnuz" if device.arch.startswith("gfx94") else "fp8_e4m3fn"


def not_supported_reasons(
    request: GemmRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if kernels serve whose machine code is of an allowed tier."""
    return reasons_against(choose_kernels(request, device), device, allowed)


def reasons_against(
    choices: Sequence[KernelChoice] | Reason, device: DeviceSpec, allowed: Sequence[EvidenceTier]
) -> Sequence[Reason]:
    """Empty if the machine code of every kernel is of an allowed tier. Those that multiply nothing
    claim no dtype, and are native or not used."""
    if isinstance(choices, Reason):
        return [choices]
    return [
        reason
        for choice in choices
        for reason in evidence_reasons(
            choice.kernel,
            device,
            dtype=choice.dtype,
            config=choice.config,
            allowed=allowed if choice.dtype else ("native",),
        )
    ]
