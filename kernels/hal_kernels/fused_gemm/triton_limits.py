"""Which products the Triton kernels fuse with what follows. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.fused_gemm import FusedGemmRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import not_written
from hal_kernels.fused_gemm.triton_variants import FLOAT16_SUFFIX, WITH_BIAS, dense_table
from hal_kernels.gemm.dense_forms import whole_size
from hal_kernels.gemm.triton_limits import (
    KernelChoice,
    choose_kernel,
    fp8_dtype,
    gated_suffix,
    reasons_against,
    size_of,
    split_of,
)

_OP = "fused_gemm"
_NO_FP8 = "sm_80"  # the one architecture for which Triton refuses to
ROUNDED_GROUPS = (32, 128)  # columns that share a scale, of what a product may store in eight bits


def form_of(request: FusedGemmRequest) -> str:
    """What follows the product, as the names of configurations have it. A gated product has one
    form whether or not its gate is clamped, a rounded one whatever its scales are, a dense one with
    a residual whether or not it has a bias: the compiled one has more to do."""
    parts = [
        "gated" * (request.epilogue == "silu_gated"),
        "residual" * request.has_residual,
        f"rounded{request.out_group_size}" * bool(request.out_group_size),
    ]
    return "-".join(filter(None, parts))


def choose_kernels(
    request: FusedGemmRequest, device: DeviceSpec
) -> tuple[KernelChoice, ...] | Reason:
    """The kernels that a request launches, in the configuration of the most tokens of its range, or
    what is not written yet."""
    missing = _not_fused(request, device) or _not_compiled(request)
    if missing is not None:
        return missing
    product = choose_kernel(request.product(), device)
    if isinstance(product, Reason):
        return product
    form, small = form_of(request), size_of(request.tokens.high) == "small"
    if product.kernel == "gemm.dense":
        return _dense(request, device, product.dtype)
    name = product.kernel.replace("gemm.", f"{_OP}.", 1)
    is_weight_only = product.kernel in ("gemm.weight_only", "gemm.fp8_weight_only")
    if request.has_bias and not is_weight_only:
        return not_written(name, "bias", "none for two FP8 operands", f"a bias, then {form}")
    split = split_of(request, device, product.kernel) if small else None
    if split is not None:
        parts, splits = split
        return parts, KernelChoice(f"{_OP}.split_k_sum", "", f"split{splits}-{form}")
    if is_weight_only and form == "gated":
        # Compiled with a clamp, which stands for none: the product of the op `gemm` is the same.
        return (product,)
    if is_weight_only:
        stem = product.config.removesuffix("-bias")
        return (KernelChoice(name, product.dtype, f"{stem}-{form}"),)
    stem = "weight32" if product.kernel == "gemm.mxfp8" else f"g{request.weight_format.group_size}"
    return (KernelChoice(name, product.dtype, f"{stem}-{form}{'-small' * small}"),)


def _dense(
    request: FusedGemmRequest, device: DeviceSpec, dtype: str
) -> tuple[KernelChoice, ...] | Reason:
    form = form_of(request)
    if dtype != "bfloat16" and form != "residual":
        return not_written(f"{_OP}.dense", "dtype", "bfloat16 unless it adds a residual", dtype)
    size = whole_size(
        request, device, request.tokens.high, table=dense_table(form), kernel=f"{_OP}.dense",
        suffix=f"-{form}",
    )  # fmt: skip
    if size == "split":
        parts = KernelChoice("gemm.dense", dtype, size + gated_suffix(request))
        stored = FLOAT16_SUFFIX * (dtype == "float16")
        return parts, KernelChoice(f"{_OP}.split_k_sum", "", f"split4-{form}{stored}")
    return (KernelChoice(f"{_OP}.dense", dtype, f"{size}-{form}"),)


def _not_fused(request: FusedGemmRequest, device: DeviceSpec) -> Reason | None:
    """What no kernel does behind any product."""
    form = form_of(request)
    if request.has_residual and form != "residual":
        return not_written(_OP, "what follows", "a residual alone, or none", form)
    if request.epilogue == "silu":
        return not_written(_OP, "epilogue", "none or silu_gated", "silu")
    if request.has_bias and form not in WITH_BIAS:
        wanted = "none unless a residual or a gate follows"
        return not_written(_OP, "bias", wanted, f"a bias, then {form}")
    if not form:
        return not_written(_OP, "what follows", "a gate, a residual or rounding", "nothing")
    group = request.out_group_size
    if not group:
        return None
    if not request.weight_format.is_dense and request.weight_format.activation == "float":
        wanted = "a residual or a gate behind a weight that alone is quantised"
        return not_written(_OP, "what follows", wanted, form)
    if device.arch == _NO_FP8:
        return Reason(
            what=f"{_OP}: rounding",
            required="an instruction set that converts to FP8",
            found=device.arch,
            kind=ReasonKind.HARDWARE,
        )
    if request.out_dtype != fp8_dtype(device):
        return not_written(_OP, "out_dtype", fp8_dtype(device), request.out_dtype)
    own = request.weight_format.group_size
    allowed = ROUNDED_GROUPS if request.weight_format.is_dense else (own,)
    if group not in allowed:
        wanted = " or ".join(map(str, allowed))
        return not_written(_OP, "out_group_size", wanted, str(group))
    return None


def _not_compiled(request: FusedGemmRequest) -> Reason | None:
    """Types that no kernel is compiled for: what is not rounded is stored as it was given, and of
    float16 there are dense products alone."""
    if not request.out_group_size and request.out_dtype not in ("", request.dtype):
        return not_written(_OP, "out_dtype", request.dtype, request.out_dtype)
    if request.dtype != "bfloat16" and not request.weight_format.is_dense:
        return not_written(_OP, "dtype", "bfloat16 for quantised weights", request.dtype)
    return None


def not_supported_reasons(
    request: FusedGemmRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if the machine code of every kernel that serves it is of an allowed tier."""
    return reasons_against(choose_kernels(request, device), device, allowed)
