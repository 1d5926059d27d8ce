"""Which rotation requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.rope import RopeRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.rope.triton_variants import config_of


def not_supported_reasons(
    request: RopeRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is that of the pairs and of the nearest size."""
    return evidence_reasons(
        "rope.rotate", device, dtype=request.dtype, config=config_of(request), allowed=allowed
    )
