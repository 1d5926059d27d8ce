"""Which gated activation requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.activation import GatedActivationRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons


def not_supported_reasons(
    request: GatedActivationRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if it serves."""
    config = f"{request.activation.split('_')[0]}{'-clamp' if request.clamp else ''}"
    return evidence_reasons(
        "activation.gated", device, dtype=request.dtype, config=config, allowed=allowed
    )
