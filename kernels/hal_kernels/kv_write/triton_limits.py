"""Which cache write requests the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_write import KvWriteRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

_PACKED = ("fp8_656", "v4_584", "v41_528", "fp8_132")


def not_written_reasons(request: KvWriteRequest) -> list[Reason]:
    """Row formats that no kernel writes."""
    if request.kv_format in ("", "bf16", *_PACKED):
        return []
    return [not_written("kv_write", "row format", ", ".join(_PACKED), request.kv_format)]


def not_supported_reasons(
    request: KvWriteRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if one serves."""
    is_packed = request.kv_format in _PACKED
    return not_written_reasons(request) or evidence_reasons(
        "kv_write.packed" if is_packed else "kv_write.dense",
        device,
        dtype="",
        config=request.kv_format if is_packed else "",
        allowed=allowed,
    )
