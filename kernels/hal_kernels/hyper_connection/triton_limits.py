"""Which hyper-connections the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.hyper_connection import HyperConnectionRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.hyper_connection.triton_variants import STREAMS, TERMS, judged_streams

_STREAMS = tuple(1 << i for i in range(STREAMS[-1].bit_length()))  # powers of two


def not_supported_reasons(
    request: HyperConnectionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve. The machine code judged is of the next number of streams that was
    compiled, of the projection of the next number of mixes."""
    streams = request.num_streams
    if streams not in _STREAMS:
        wanted = " or ".join(map(str, _STREAMS))
        return [not_written("hyper_connection", "num_streams", wanted, str(streams))]
    if request.dtype not in TERMS:
        wanted = " or ".join(TERMS)
        return [not_written("hyper_connection", "dtype", wanted, request.dtype)]
    config = f"n{judged_streams(streams)}"
    if request.kind == "post":
        return evidence_reasons(
            "hyper_connection.expand", device, dtype=request.dtype, config=config, allowed=allowed
        )
    reasons = evidence_reasons(
        "hyper_connection.collapse", device, dtype=request.dtype,
        config=f"{config}-lagged" if request.is_lagged else config, allowed=allowed,
    )  # fmt: skip
    if request.kind == "pre" or not request.is_lagged:
        reasons += evidence_reasons(
            "hyper_connection.mixes", device, dtype="bfloat16",
            config=f"n{_streams_of_mixes(request.num_mixes)}-{request.dtype}", allowed=allowed,
        )  # fmt: skip
    return reasons


def _streams_of_mixes(num_mixes: int) -> int:
    """Of the compiled projections the narrowest that has as many mixes: their number decides its
    tile, and eight streams that are only summed at the end have fewer than four that are mixed."""
    return next(n for n in STREAMS if num_mixes <= n * (2 + n))
