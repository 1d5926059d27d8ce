"""Which rounding requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.quantize import QuantizeRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.aot.targets import TARGETS
from hal_kernels.quantize.triton_variants import (
    FP4,
    GROUPS,
    converts_in_integers,
    eight_bits,
)


def not_supported_reasons(
    request: QuantizeRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is of the same type and scales, and of the next
    size of group that was compiled."""
    kernel = "quantize.fp4" if request.out_dtype in FP4 else "quantize.groups"
    reasons = _unwritten(kernel, request)
    if reasons:
        return reasons
    config = str(request.out_dtype)
    if kernel == "quantize.groups":
        group = request.group_size
        values = group or request.width
        name = next((name for name, most in GROUPS.items() if values <= most), "looped")
        config += f"-{name}{'-ue8m0' if request.scale_dtype == 'ue8m0' else ''}"
        in_integers = converts_in_integers(device.arch, request.out_dtype)
        if name == "looped":
            kernel = "quantize.looped"
        elif in_integers:
            kernel = "quantize.codes"
        reasons = [] if in_integers else _conversion(request.out_dtype, device.arch)
    return reasons or evidence_reasons(
        kernel, device, dtype=request.dtype, config=config, allowed=allowed
    )


def _unwritten(kernel: str, request: QuantizeRequest) -> list[Reason]:
    group = request.group_size
    if group & (group - 1):
        return [not_written(kernel, "group_size", "a power of two", str(group))]
    if kernel == "quantize.fp4":
        wanted = 32 if request.out_dtype == "mxfp4" else 16
        if not 2 <= group <= wanted:
            return [not_written(kernel, "group_size", f"2 to {wanted}", str(group))]
        return []
    if request.scale_dtype not in ("float32", "ue8m0"):
        return [not_written(kernel, "scale_dtype", "float32 or ue8m0", request.scale_dtype)]
    # A row with one float32 scale has any width.
    values, most = group, GROUPS["wide-row"]
    if request.scale_dtype == "ue8m0":
        values, most = group or request.width, GROUPS["g128"]
    if values > most:
        what = f"values of a {request.scale_dtype} scale"
        return [not_written(kernel, what, f"at most {most}", str(values))]
    if request.out_dtype == "int8" and request.scale_dtype != "float32":
        return [not_written(kernel, "scale_dtype of int8", "float32", request.scale_dtype)]
    return []


def _conversion(out_dtype: str, arch: str) -> list[Reason]:
    """Why the architecture does not round to that type of eight bits; empty if it does."""
    written = next((eight_bits(target) for target in TARGETS if target.arch == arch), (out_dtype,))
    if out_dtype in written:
        return []
    return [
        Reason(
            what="out_dtype", required=f"{' or '.join(written)} on {arch}", found=out_dtype,
            kind=ReasonKind.HARDWARE,
        )
    ]  # fmt: skip
