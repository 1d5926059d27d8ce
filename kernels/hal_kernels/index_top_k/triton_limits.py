"""Which choices of entries the Triton kernels make. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.index_top_k import IndexTopKRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons


def not_supported_reasons(
    request: IndexTopKRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if the machine code of the kernels is of an allowed tier."""
    config = "pools" if request.pool_size > 1 else "plain"
    if request.candidate_blocks and not request.publishes_candidates:
        config = "candidates"
    reasons = evidence_reasons(
        "index_top_k.radix", device, dtype="", config=config, allowed=allowed
    )
    if request.publishes_candidates:
        reasons += evidence_reasons("index_top_k.block_maxima", device, dtype="", allowed=allowed)
    return reasons
