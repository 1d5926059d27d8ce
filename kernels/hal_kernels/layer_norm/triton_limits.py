"""Which layer norms the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.layer_norm import LayerNormRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

MAX_HIDDEN = 16384


def not_supported_reasons(
    request: LayerNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    if request.hidden_size > MAX_HIDDEN:
        hidden = str(request.hidden_size)
        return [not_written("layer_norm", "hidden_size", f"at most {MAX_HIDDEN}", hidden)]
    return evidence_reasons("layer_norm.rows", device, dtype="", allowed=allowed)
