"""Which compressors the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_compressor import KvCompressorRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.kv_compressor.triton_variants import state_config

_KERNEL = "kv_compressor.pool"
_MOST_DIM = 512


def not_supported_reasons(
    request: KvCompressorRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve and their machine code is of an allowed tier."""
    if request.head_dim > _MOST_DIM:
        return [
            Reason(
                what="head_dim",
                required=f"at most {_MOST_DIM}",
                found=str(request.head_dim),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    config = "overlapping" if request.is_overlapping else "plain"
    return [
        *evidence_reasons(_KERNEL, device, dtype=request.dtype, config=config, allowed=allowed),
        *evidence_reasons(
            "kv_compressor.state", device, dtype=request.dtype,
            config=state_config(is_overlapping=request.is_overlapping), allowed=allowed,
        ),
    ]  # fmt: skip
