"""Which choices of experts the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.moe_router import MoeRouterRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.moe_router.triton_variants import (
    MAX_EXPERTS,
    MAX_GROUPS,
    MAX_TOP_K,
    WITHOUT_BIAS,
    hash_config,
    scored_config,
)


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
    if request.dtype != "float32":
        return [not_written(kernel, "dtype of the logits", "float32", request.dtype)]
    if request.has_bias and request.scoring in WITHOUT_BIAS:
        return [not_written(kernel, "bias", f"none for scores by {request.scoring}", "a bias")]
    is_grouped = groups > request.num_groups_picked
    if is_grouped and (experts & (experts - 1) or groups & (groups - 1) or groups > MAX_GROUPS):
        wanted = f"powers of two, at most {MAX_GROUPS} groups"
        return [not_written(kernel, "experts in groups", wanted, f"{experts} in {groups}")]
    if request.scoring == "hash":
        config = hash_config(request.top_k)
    else:
        config = scored_config(request.scoring, experts, is_grouped=is_grouped)
    return evidence_reasons(kernel, device, dtype="", config=config, allowed=allowed)
