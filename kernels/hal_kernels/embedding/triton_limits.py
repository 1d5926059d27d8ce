"""Which gather requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.embedding import EmbeddingRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons


def not_supported_reasons(
    request: EmbeddingRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    return evidence_reasons(
        "embedding.gather", device, dtype=request.dtype, config="h2048", allowed=allowed
    )
