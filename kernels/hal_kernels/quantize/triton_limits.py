"""Which rounding requests the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.quantize import QuantizeRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.quantize.triton_variants import FP4


def not_supported_reasons(
    request: QuantizeRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves."""
    kernel = "quantize.fp4" if request.out_dtype in FP4 else "quantize.groups"
    if request.out_dtype in FP4 and request.group_size < 2:
        found = str(request.group_size)
        return [not_written(kernel, "group_size", "at least 2", found)]
    if request.out_dtype not in FP4 and request.scale_dtype not in ("float32", "ue8m0"):
        return [not_written(kernel, "scale_dtype", "float32 or ue8m0", request.scale_dtype)]
    if request.group_size & (request.group_size - 1):
        return [not_written(kernel, "group_size", "a power of two", str(request.group_size))]
    return evidence_reasons(kernel, device, dtype="", allowed=allowed)
