"""Which norms the Triton kernels serve, and by which of them. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.norm import RmsNormRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.norm.triton_variants import WIDTHS


def not_supported_reasons(
    request: RmsNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if they serve, rows of any width. The machine code judged is of the next width that was
    compiled, or of the loop over wider rows."""
    width = next((w for w in WIDTHS if request.hidden_size <= w), 0)
    form = "residual" if request.has_residual else "plain"
    if request.quantize != "none":
        form = "int8"
    kernel, rows = ("norm.rms", f"h{width}") if width else ("norm.rms_looped", "looped")
    return evidence_reasons(
        kernel, device, dtype=request.dtype, config=f"{rows}-{form}", allowed=allowed
    )
