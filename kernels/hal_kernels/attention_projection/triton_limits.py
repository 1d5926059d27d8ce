"""Which attention with projection the Triton kernels compute. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_of, evidence_reasons, not_written
from hal_kernels.attention import triton_limits as attention_limits
from hal_kernels.attention.triton_variants import DECODE_ROWS

MAX_ROWS = 16  # one tile of rows
_HEAD_SIZES = (64, 128, 256)


def _size_of(request: AttentionProjectionRequest) -> int:
    return next(size for size in _HEAD_SIZES if max(request.head_dim, request.v_head_dim) <= size)


def not_supported_reasons(
    request: AttentionProjectionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernels serve whose machine code is of an allowed tier: the attention's own by
    splits of the keys, the one that merges and multiplies, and the sum of parts."""
    if request.phase != "decode":
        return [not_written("attention_projection", "phase", "decode", request.phase)]
    if request.tokens.high > MAX_ROWS:
        return [
            Reason(
                what="rows",
                required=f"at most {MAX_ROWS}: each further tile of rows reads the weight again",
                found=str(request.tokens.high),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    if request.kv_dtype != request.dtype:
        return [not_written("attention_projection", "kv_dtype", request.dtype, request.kv_dtype)]
    group = request.num_heads // request.num_kv_heads
    if group > DECODE_ROWS[0]:
        return [
            Reason(
                what="query heads of a KV head",
                required=f"at most {DECODE_ROWS[0]}: one pass holds no more; attention alone does",
                found=str(group),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    reasons = attention_limits.attending_reasons(request.attention, device, allowed=allowed)
    if reasons:
        return reasons
    needed = [("merge", request.dtype, f"d{_size_of(request)}-{form}") for form in ("one", "many")]
    needed += [("sum", request.dtype, "residual")]
    if has_one_pass(request, device):  # used where it is native, and not asked for elsewhere
        needed += [("one_pass", request.dtype, _one_pass_config(request))]
    return [
        reason
        for kernel, dtype, config in needed
        for reason in evidence_reasons(
            f"attention_projection.{kernel}", device, dtype=dtype, config=config, allowed=allowed
        )
    ]


def has_one_pass(request: AttentionProjectionRequest, device: DeviceSpec) -> bool:
    """Whether the one-pass kernel is a fast path on the device too; where not, it is not used. Nor
    is it for capped scores with a window or sinks: it is not compiled for both."""
    if request.softcap and (request.window or request.has_sinks):
        return False
    config = _one_pass_config(request)
    found = evidence_of("attention_projection.one_pass", device, request.dtype, config)
    return found is not None and found.tier == "native"


def _one_pass_config(request: AttentionProjectionRequest) -> str:
    form = "softcap" if request.softcap else "plain"
    if request.window or request.has_sinks:
        form = "window-sinks"
    return f"d{_size_of(request)}-{form}"
