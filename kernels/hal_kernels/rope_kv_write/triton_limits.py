"""Which requests the pass from projection to attention serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.rope_kv_write import RopeKvWriteRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.activation_dtypes import ACTIVATION_DTYPES
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.kv_write.cache_dtypes import fp8_of
from hal_kernels.rope_kv_write.triton_variants import config_of

_KERNEL = "rope_kv_write.pass"


def not_supported_reasons(
    request: RopeKvWriteRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is that of the nearest head size."""
    rounded = fp8_of(device.arch)
    if request.dtype not in ACTIVATION_DTYPES:
        return [not_written(_KERNEL, "dtype", " or ".join(ACTIVATION_DTYPES), request.dtype)]
    is_fp8 = request.kv_dtype != request.dtype
    if is_fp8 and (request.kv_dtype != rounded or request.dtype == "float32"):
        or_rounded = f", or {rounded}" if request.dtype != "float32" else ""
        return [
            Reason(
                what="kv_dtype",
                required=f"the activations' {request.dtype}{or_rounded}",
                found=request.kv_dtype,
                kind=ReasonKind.ARGUMENT,
            )
        ]
    config = config_of(
        request.head_dim,
        has_norm=request.has_qk_norm,
        is_interleaved=request.style == "interleaved",
        is_fp8=is_fp8,
        has_scales=request.has_kv_scales,
    )
    return evidence_reasons(_KERNEL, device, dtype=request.dtype, config=config, allowed=allowed)
