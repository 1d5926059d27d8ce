"""Which cache write requests the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal.ops.kv_write import KvWriteRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.kv_write.triton_variants import DENSE_SUFFIXES


def not_supported_reasons(
    request: KvWriteRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if one serves."""
    kernel, config = "kv_write.dense", ""
    is_plain = request.kv_format in PLAIN_FORMATS
    # A format says what a row is made of, whatever dtype was named beside it.
    dtype = KV_FORMATS[request.kv_format].element if is_plain else request.kv_dtype
    if dtype == "float16":
        config = f"row1024{DENSE_SUFFIXES[dtype]}"
    if request.kv_format and not is_plain:
        kernel, config = "kv_write.packed", request.kv_format
        if KV_FORMATS[config].element == "fp4_e2m1":
            kernel = "kv_write.fp4"
    return evidence_reasons(kernel, device, dtype="", config=config, allowed=allowed)
