"""Which filters of logits the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.sampling import TopKTopPRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

MAX_VOCABULARY = (1 << 24) - 1  # counts are exact in float32


def not_supported_reasons(
    request: TopKTopPRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    kernel = "sampling.top_k_top_p"
    if request.vocab_size > MAX_VOCABULARY:
        found = str(request.vocab_size)
        return [not_written(kernel, "vocab_size", f"at most {MAX_VOCABULARY}", found)]
    return evidence_reasons(kernel, device, dtype="", config="f32", allowed=allowed)
