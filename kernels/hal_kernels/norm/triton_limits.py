"""Which norms the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.norm.triton_variants import WIDTHS


def not_supported_reasons(
    request: RmsNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is of the next width that was compiled."""
    width = next((w for w in WIDTHS if request.hidden_size <= w), 0)
    if not width:
        return [
            Reason(
                what="hidden_size",
                required=f"at most {WIDTHS[-1]}",
                found=str(request.hidden_size),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    form = "residual" if request.has_residual else "plain"
    config = f"h{width}-{form if request.quantize == 'none' else 'int8'}"
    return evidence_reasons("norm.rms", device, dtype=request.dtype, config=config, allowed=allowed)
