"""Which dispatches the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.moe_dispatch.triton_variants import MAX_TOP_K, ORDERS, rows_config

# The one that sees integers alone, in every form that some number of tokens takes, and the one that
# moves rows.
_KERNELS = {"permute": ("places", ORDERS, "spread"), "combine": ("invert", ("m1024",), "combine")}


def not_supported_reasons(
    request: MoeDispatchRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if they serve."""
    order, forms, rows = _KERNELS[request.kind]
    if request.top_k > MAX_TOP_K:
        found = str(request.top_k)
        return [not_written(f"moe_dispatch.{rows}", "top_k", f"at most {MAX_TOP_K}", found)]
    queries = [(order, "", form) for form in forms]
    queries.append((rows, request.dtype, rows_config(request.top_k)))
    return [
        reason
        for name, dtype, config in queries
        for reason in evidence_reasons(
            f"moe_dispatch.{name}", device, dtype=dtype, config=config, allowed=allowed
        )
    ]
