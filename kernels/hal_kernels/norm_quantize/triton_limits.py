"""Which norms with rounding the Triton kernels serve, and by which. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.norm_quantize import NormQuantizeRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.norm_quantize.triton_variants import FORMS, WIDTHS

_KERNEL = "norm_quantize.rows"


def not_supported_reasons(
    request: NormQuantizeRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve, rows of any width. The machine code judged is of the same rounding, of
    the next width that was compiled or of the loop over wider rows, with a residual and with the
    rows kept."""
    width = next((w for w in WIDTHS if request.hidden_size <= w), 0)
    if request.dtype not in ACTIVATION_DTYPES:
        return [not_written(_KERNEL, "dtype", " or ".join(ACTIVATION_DTYPES), request.dtype)]
    written = {form: name for name, form in FORMS.items()}
    if request.out_dtype == "int8":
        written = {(0, False): "row"}
    form = (request.group_size, request.scale_dtype == "ue8m0")
    if form not in written:
        found = f"{request.scale_dtype} scales for {request.group_size or 'all'} values"
        return [not_written(_KERNEL, "rounding", ", ".join(written.values()), found)]
    reasons = [] if request.out_dtype == "int8" else _conversion(request.out_dtype, device.arch)
    if reasons:
        return reasons
    kernel, rows = (_KERNEL, f"h{width}") if width else ("norm_quantize.looped", "looped")
    config = f"{rows}-{request.out_dtype.split('_', maxsplit=1)[0]}-{written[form]}"
    return evidence_reasons(kernel, device, dtype=request.dtype, config=config, allowed=allowed)


def _conversion(out_dtype: str, arch: str) -> list[Reason]:
    """Why the architecture does not round to that type of eight bits; empty if it does."""
    own = "fp8_e4m3fnuz" if arch.startswith("gfx94") else "fp8_e4m3fn"
    if out_dtype == own:
        return []
    return [
        Reason(
            what="out_dtype", required=f"{own} or int8 on {arch}", found=out_dtype,
            kind=ReasonKind.HARDWARE,
        )
    ]  # fmt: skip
