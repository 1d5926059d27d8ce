"""Which compression of blocks the Triton kernels compute. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.nsa_compress import NsaCompressRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.nsa_compress.triton_variants import DTYPES, form_of


def not_supported_reasons(
    request: NsaCompressRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernels serve and the machine code of each is of an allowed tier. In float16
    they serve hidden values of up to 65,504: a request does not say how large they become."""
    if request.dtype not in DTYPES:
        return [not_written("nsa_compress", "dtype", " or ".join(DTYPES), request.dtype)]
    return [
        reason
        for kernel in ("hidden", "project")
        for reason in evidence_reasons(
            f"nsa_compress.{kernel}",
            device,
            dtype=request.dtype,
            config=form_of(request.phase),
            allowed=allowed,
        )
    ]
