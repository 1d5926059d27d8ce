"""Which indexer calls the Triton kernels serve as one. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.index_selection import IndexSelectionRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.index_logits import triton_limits as index_logits
from hal_kernels.index_selection.pieces import scores_candidates_alone


def not_supported_reasons(
    request: IndexSelectionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the scores are of an allowed tier and the kernels of the choice are native."""
    alone = scores_candidates_alone(request)
    scores = index_logits.not_supported_reasons(
        request.logits, device, allowed=allowed, is_listed=alone
    )
    kernels = [("index_selection.visible", "queries")]
    if alone:
        kernels += [("index_top_k.radix", "candidates-alone")]
    elif request.is_limited:
        kernels += [("index_selection.mark", "candidates"), ("index_selection.merge", "limited")]
    else:
        config = "pools" if request.pool_size > 1 else "plain"
        kernels += [("index_selection.merge", config)]
    if request.publishes_candidates:
        kernels += [("index_selection.maxima", "blocks")]
    choice = [
        reason
        for kernel, config in kernels
        for reason in evidence_reasons(kernel, device, dtype="", config=config)
    ]
    return [*scores, *choice]
