"""Which choices of experts the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.moe_router import MoeRouterRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

MAX_EXPERTS = 1024
MAX_TOP_K = 32


def not_supported_reasons(
    request: MoeRouterRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if they serve."""
    kernel = "moe_router.hash" if request.scoring == "hash" else "moe_router.scored"
    experts, groups = request.num_experts, request.num_groups
    if experts > MAX_EXPERTS:
        return [not_written(kernel, "num_experts", f"at most {MAX_EXPERTS}", str(experts))]
    if request.top_k > MAX_TOP_K:
        return [not_written(kernel, "top_k", f"at most {MAX_TOP_K}", str(request.top_k))]
    if groups > request.num_groups_picked and (experts & (experts - 1) or groups & (groups - 1)):
        found = f"{experts} in {groups}"
        return [not_written(kernel, "experts in groups", "powers of two", found)]
    return evidence_reasons(kernel, device, dtype="", allowed=allowed)
