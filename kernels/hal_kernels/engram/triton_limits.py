"""Which steps of Engram the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.engram import EngramRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.engram.triton_variants import (
    MAX_STREAMS,
    MAX_VALUES,
    gather_config,
    gathered_values,
    mix_config,
)


def not_supported_reasons(
    request: EngramRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if they serve."""
    kernel = f"engram.{request.kind}"
    if request.kind == "gather":
        values = gathered_values(request.num_heads, request.row_width)
        if values > MAX_VALUES:
            what = "num_heads * row_width, each padded to a power of two"
            return [not_written(kernel, what, f"at most {MAX_VALUES} values", str(values))]
        config = gather_config(request.num_heads, request.row_width)
    else:
        if request.num_streams > MAX_STREAMS:
            wanted, found = f"at most {MAX_STREAMS}", str(request.num_streams)
            return [not_written(kernel, "num_streams", wanted, found)]
        config = mix_config(request.num_streams)
    return evidence_reasons(kernel, device, dtype=request.dtype, config=config, allowed=allowed)
