"""Which cache write requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_write import KvWriteRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written


def not_supported_reasons(
    request: KvWriteRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    if request.kv_format:
        return [not_written("kv_write", "row format", "dense rows", request.kv_format)]
    return evidence_reasons("kv_write.dense", device, dtype="", allowed=allowed)
