"""Which products with residual and norm the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.gemm_norm import GemmNormRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.fused_gemm import triton_limits as fused_gemm
from hal_kernels.norm import triton_limits as norm


def not_supported_reasons(
    request: GemmNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if the product with its residual is of an allowed tier, and the norm serves."""
    return [
        *fused_gemm.not_supported_reasons(request.fused(), device, allowed=allowed),
        *norm.not_supported_reasons(request.norm(), device),
    ]
