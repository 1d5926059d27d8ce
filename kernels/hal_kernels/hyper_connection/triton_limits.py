"""Which hyper-connections the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.hyper_connection.triton_variants import TERMS

_STREAMS = (1, 2, 4, 8)


def not_supported_reasons(
    request: HyperConnectionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve."""
    streams = request.num_streams
    if streams not in _STREAMS:
        wanted = " or ".join(map(str, _STREAMS))
        return [not_written("hyper_connection", "num_streams", wanted, str(streams))]
    if request.dtype not in TERMS:
        wanted = " or ".join(TERMS)
        return [not_written("hyper_connection", "dtype", wanted, request.dtype)]
    if request.kind == "post":
        return evidence_reasons(
            "hyper_connection.expand", device, dtype=request.dtype, allowed=allowed
        )
    reasons = evidence_reasons(
        "hyper_connection.collapse", device, dtype=request.dtype, allowed=allowed
    )
    if request.kind == "pre" or not request.is_lagged:
        reasons += evidence_reasons(
            "hyper_connection.mixes", device, dtype="bfloat16",
            config=f"{request.dtype}", allowed=allowed,
        )  # fmt: skip
    return reasons
