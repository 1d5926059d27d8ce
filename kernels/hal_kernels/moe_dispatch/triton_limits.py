"""Which dispatches the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons

_KERNELS = {
    "permute": ("moe_dispatch.places", "moe_dispatch.spread"),
    "combine": ("moe_dispatch.invert", "moe_dispatch.combine"),
}


def not_supported_reasons(
    request: MoeDispatchRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve."""
    return [
        reason
        for kernel in _KERNELS[request.kind]
        for reason in evidence_reasons(kernel, device, dtype="", allowed=allowed)
    ]
