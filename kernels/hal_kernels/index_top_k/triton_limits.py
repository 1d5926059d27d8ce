"""Which choices of entries the Triton kernel makes. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.index_top_k import IndexTopKRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

_KERNEL = "index_top_k.radix"


def not_written_reasons(request: IndexTopKRequest) -> list[Reason]:
    """Forms of the op that the kernel does not have."""
    if request.candidate_blocks:
        found = str(request.candidate_blocks)
        return [not_written(_KERNEL, "candidate blocks", "0", found)]
    return []


def not_supported_reasons(
    request: IndexTopKRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if the kernel serves and its machine code is of an allowed tier."""
    config = "pools" if request.pool_size > 1 else "plain"
    return not_written_reasons(request) or evidence_reasons(
        _KERNEL, device, dtype="", config=config, allowed=allowed
    )
