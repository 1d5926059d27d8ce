"""Which steps of Engram the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.engram import EngramRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

MAX_VALUES = 8192  # of the rows of all heads, in registers


def not_supported_reasons(
    request: EngramRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if they serve."""
    kernel = f"engram.{request.kind}"
    values = request.num_heads * request.row_width
    if request.kind == "gather" and values > MAX_VALUES:
        wanted = f"at most {MAX_VALUES} values"
        return [not_written(kernel, "num_heads * row_width", wanted, str(values))]
    return evidence_reasons(kernel, device, dtype=request.dtype, allowed=allowed)
