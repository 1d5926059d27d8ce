"""Which layer norms the Triton kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.layer_norm import LayerNormRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.layer_norm.triton_variants import WIDTHS


def not_supported_reasons(
    request: LayerNormRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is of the next width that was compiled."""
    width = next((w for w in WIDTHS if request.hidden_size <= w), 0)
    if not width:
        hidden = str(request.hidden_size)
        return [not_written("layer_norm", "hidden_size", f"at most {max(WIDTHS)}", hidden)]
    return evidence_reasons(
        "layer_norm.rows", device, dtype=request.dtype, config=f"h{width}", allowed=allowed
    )
