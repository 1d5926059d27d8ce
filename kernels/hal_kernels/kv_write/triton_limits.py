"""Which cache write requests the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal.ops.kv_write import KvWriteRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.kv_write.cache_dtypes import fp8_of
from hal_kernels.kv_write.triton_variants import PACKED_DTYPES


def not_supported_reasons(
    request: KvWriteRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if one serves."""
    if request.kv_format and request.kv_format not in PLAIN_FORMATS:
        kernel, config = "kv_write.packed", str(request.kv_format)
        if KV_FORMATS[config].element == "fp4_e2m1":
            kernel = "kv_write.fp4"
        if request.dtype not in PACKED_DTYPES:
            return [not_written(kernel, "dtype", " or ".join(PACKED_DTYPES), request.dtype)]
        return evidence_reasons(kernel, device, dtype=request.dtype, config=config, allowed=allowed)
    # A format says what a row is made of, whatever dtype was named beside it.
    form = KV_FORMATS.get(request.kv_format)
    cache = request.kv_dtype if form is None else form.element
    rounded = fp8_of(device.arch)
    if cache not in (request.dtype, rounded) or (cache == rounded and request.dtype == "float32"):
        wanted = f"the activations' {request.dtype}"
        if request.dtype != "float32":
            wanted += f", or {rounded}"
        return [not_written("kv_write.dense", "kv_dtype", wanted, cache)]
    config = "row1024"
    if cache != request.dtype:
        config += "-fp8-scaled" if request.has_scales else "-fp8"
    return evidence_reasons(
        "kv_write.dense", device, dtype=request.dtype, config=config, allowed=allowed
    )
