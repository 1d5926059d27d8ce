"""Which requests the pass from projection to attention serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.rope_kv_write.triton_variants import DTYPES, NO_FP8

_KERNEL = "rope_kv_write.pass"


def not_supported_reasons(
    request: RopeKvWriteRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is that of the nearest head size."""
    rounded = _rounded_dtype(device.arch)
    config = f"d{64 if request.head_dim <= 64 else 128}{'-norm' if request.has_qk_norm else ''}"
    if request.dtype not in DTYPES:
        return [not_written(_KERNEL, "dtype", " or ".join(DTYPES), request.dtype)]
    reasons: list[Reason] = []
    if request.kv_dtype != request.dtype:
        config += "-fp8"
        if request.kv_dtype != rounded:
            reasons.append(
                Reason(
                    what="kv_dtype",
                    required=f"the activations' {request.dtype}" + (rounded and f", or {rounded}"),
                    found=request.kv_dtype,
                    kind=ReasonKind.ARGUMENT,
                )
            )
            return reasons
    return evidence_reasons(_KERNEL, device, dtype=request.dtype, config=config, allowed=allowed)


def _rounded_dtype(arch: str) -> str:
    """torch's name of the e4m3 type that the architecture converts to, "" for none."""
    if arch in NO_FP8:
        return ""
    return "float8_e4m3fnuz" if arch.startswith("gfx94") else "float8_e4m3fn"
