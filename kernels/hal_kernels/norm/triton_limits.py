"""Which norms the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons

MAX_HIDDEN = 16384


def not_supported_reasons(
    request: RmsNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    if request.hidden_size > MAX_HIDDEN:
        return [
            Reason(
                what="hidden_size",
                required=f"at most {MAX_HIDDEN}",
                found=str(request.hidden_size),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    return evidence_reasons("norm.rms", device, dtype="", allowed=allowed)
