"""Which layer norms the Triton kernels serve, and by which of them. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.layer_norm import LayerNormRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.norm.triton_variants import WIDTHS


def not_supported_reasons(
    request: LayerNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if they serve, rows of any width. The machine code judged is of the next width that was
    compiled, or of the loop over wider rows."""
    width = next((w for w in WIDTHS if request.hidden_size <= w), 0)
    kernel, config = ("layer_norm.rows", f"h{width}") if width else ("layer_norm.looped", "looped")
    return evidence_reasons(kernel, device, dtype=request.dtype, config=config, allowed=allowed)
