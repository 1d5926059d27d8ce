"""Which passes over queries and one row a token the kernel serves. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.latent_kv_write import LatentKvWriteRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.latent_kv_write.triton_variants import (
    LAYER_NORMED,
    ROWS,
    config_of,
    dtype_of,
)

_KERNEL = "latent_kv_write.pass"
_MOST_VALUES = 576  # of a row or a normed head: what a program was compiled with


def not_supported_reasons(
    request: LatentKvWriteRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if it serves. The machine code judged is that of the row's format, pairs and norms."""
    reasons = _unwritten(request)
    if reasons:
        return reasons
    return evidence_reasons(
        _KERNEL, device, dtype=request.dtype, config=config_of(request), allowed=allowed
    )


def _unwritten(request: LatentKvWriteRequest) -> list[Reason]:
    form = KV_FORMATS[request.kv_format]
    start, rotary = request.row_rotary_start, request.rotary_dim
    values = form.quantized_dim or request.row_dim
    normed = request.head_dim if request.has_q_norm else 0
    half_split = request.style == "half_split"
    has_layer_norm = request.norm_dim > 0 and request.row_norm_kind == "layer"
    checks = (
        ("kv_format", " or ".join(ROWS), request.kv_format, request.kv_format in ROWS),
        (
            f"dtype for {request.kv_format}",
            dtype_of(request.kv_format),
            request.dtype,
            request.dtype == dtype_of(request.kv_format),
        ),
        (
            "layer norm",
            f"of rows in {' or '.join(LAYER_NORMED)}, with queries that are not normed",
            f"{request.kv_format}, has_q_norm {request.has_q_norm}",
            not has_layer_norm or (request.kv_format in LAYER_NORMED and not request.has_q_norm),
        ),
        (
            "values of a row or of a normed head",
            f"at most {_MOST_VALUES}",
            str(max(request.row_dim, normed)),
            max(request.row_dim, normed) <= _MOST_VALUES,
        ),
        (
            "row_dim of rows in a floating dtype",
            "a multiple of 64",
            str(request.row_dim),
            not form.is_plain or request.row_dim % 64 == 0,
        ),
        (
            "rotated values",
            "an even number, of neighbours from an even place on, within the rounded or the plain "
            "ones of a row",
            f"{rotary} from {start} on, {values} rounded",
            rotary % 2 == 0
            and (half_split or start % 2 == request.q_rotary_start % 2 == 0)
            and (start >= values or start + rotary <= values),
        ),
    )
    return [
        not_written(_KERNEL, what, required, found)
        for what, required, found, is_met in checks
        if not is_met
    ]
