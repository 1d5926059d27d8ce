"""Which rounding requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.quantize import QuantizeRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written


def not_supported_reasons(
    request: QuantizeRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    if request.out_dtype not in ("int8", "fp8_e4m3fn", "fp8_e4m3fnuz"):
        return [not_written("quantize.groups", "out_dtype", "int8 or fp8", request.out_dtype)]
    if request.scale_dtype not in ("float32", "ue8m0"):
        scales = request.scale_dtype
        return [not_written("quantize.groups", "scale_dtype", "float32 or ue8m0", scales)]
    if request.group_size & (request.group_size - 1):
        size = str(request.group_size)
        return [not_written("quantize.groups", "group_size", "a power of two", size)]
    return evidence_reasons("quantize.groups", device, dtype="", allowed=allowed)
