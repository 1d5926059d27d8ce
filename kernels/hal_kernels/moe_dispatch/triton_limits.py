"""Which dispatches the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons

# The one that sees integers alone, and the one that moves rows.
_KERNELS = {"permute": ("places", "spread"), "combine": ("invert", "combine")}


def not_supported_reasons(
    request: MoeDispatchRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve."""
    order, rows = (f"moe_dispatch.{name}" for name in _KERNELS[request.kind])
    return [
        *evidence_reasons(order, device, dtype="", allowed=allowed),
        *evidence_reasons(rows, device, dtype=request.dtype, allowed=allowed),
    ]
