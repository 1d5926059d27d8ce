"""Which attention requests the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.attention import AttentionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.attention.triton_variants import form_of

MAX_HEAD_DIM = 256
_DTYPES = ("bfloat16", "float16")
_MOST_GROUP = 16  # query heads of a cached head: what the evidence of a decode is of


def not_supported_reasons(
    request: AttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if a kernel serves whose machine code is of an allowed tier."""
    kernel = "attention.decode" if request.phase == "decode" else "attention.prefill"
    if request.dtype not in _DTYPES:
        return [not_written(kernel, "dtype", " or ".join(_DTYPES), request.dtype)]
    if request.kv_dtype != request.dtype:
        return [not_written(kernel, "kv_dtype", request.dtype, request.kv_dtype)]
    widest = max(request.head_dim, request.v_head_dim)
    if widest > MAX_HEAD_DIM:
        return [
            Reason(
                what="head_dim",
                required=f"at most {MAX_HEAD_DIM}",
                found=str(widest),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    group = request.num_heads // request.num_kv_heads
    if request.phase == "decode" and group > _MOST_GROUP:
        return [
            Reason(
                what="query heads of a KV head",
                required=f"at most {_MOST_GROUP} in a decode, which are what its programs hold",
                found=str(group),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    size = next(size for size in (64, 128, 256) if widest <= size)
    return evidence_reasons(
        kernel,
        device,
        dtype=request.dtype,
        config=f"d{size}-{form_of_request(request)}",
        allowed=allowed,
    )


def form_of_request(request: AttentionRequest) -> str:
    """The compiled form that judges a request, and whose tiles it is launched with."""
    return form_of(
        has_window=bool(request.window),
        has_sinks=request.has_sinks,
        has_softcap=bool(request.softcap),
    )
