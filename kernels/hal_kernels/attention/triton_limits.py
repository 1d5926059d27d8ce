"""Which attention requests the Triton kernels serve. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.attention import AttentionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.attention.triton_variants import (
    decode_config,
    decode_rows,
    form_of,
    group_rows,
    padded_head,
    prefill_config,
)
from hal_kernels.kv_write.cache_dtypes import fp8_of

MAX_HEAD_DIM = 256
_DTYPES = ("bfloat16", "float16")


def not_supported_reasons(
    request: AttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if a kernel serves whose machine code is of an allowed tier and, of a decode, that of
    the kernel which merges its splits is native."""
    reasons = attending_reasons(request, device, allowed=allowed)
    if request.phase != "decode" or misfit_of(request, device.arch):
        return reasons
    size = padded_head(max(request.head_dim, request.v_head_dim))
    config = f"d{size}-sinks" if request.has_sinks else f"d{size}"
    merge = evidence_reasons("attention.merge", device, dtype=request.dtype, config=config)
    return [*reasons, *merge]


def attending_reasons(
    request: AttentionRequest, device: DeviceSpec, *, allowed: Sequence[EvidenceTier] = ("native",)
) -> Sequence[Reason]:
    """As `not_supported_reasons`, of the kernel that attends alone."""
    misfit = misfit_of(request, device.arch)
    if misfit:
        return [misfit]
    size, form = padded_head(max(request.head_dim, request.v_head_dim)), form_of_request(request)
    is_fp8 = request.kv_dtype != request.dtype
    config = prefill_config(size, form, is_fp8=is_fp8)
    if request.phase == "decode":
        config = decode_config(size, form, rows_of(request), is_fp8=is_fp8)
    return evidence_reasons(
        kernel_of(request), device, dtype=request.dtype, config=config, allowed=allowed
    )


def kernel_of(request: AttentionRequest) -> str:
    """The kernel that attends, by its name in the catalogue."""
    return "attention.decode" if request.phase == "decode" else "attention.prefill"


def misfit_of(request: AttentionRequest, arch: str) -> Reason | None:
    """What of a request is in no form that is compiled for the architecture."""
    kernel = kernel_of(request)
    if request.dtype not in _DTYPES:
        return not_written(kernel, "dtype", " or ".join(_DTYPES), request.dtype)
    if request.kv_dtype not in (request.dtype, fp8_of(arch)):
        return not_written(
            kernel, "kv_dtype", f"{request.dtype} or {fp8_of(arch)}", request.kv_dtype
        )
    widest = max(request.head_dim, request.v_head_dim)
    if widest > MAX_HEAD_DIM:
        return _argument("head_dim", f"at most {MAX_HEAD_DIM}", widest)
    if request.phase != "decode":
        return None
    form, is_fp8 = form_of_request(request), request.kv_dtype != request.dtype
    most, why = decode_rows(widest, form, is_fp8=is_fp8)[-1], "which are what its programs hold"
    if is_fp8 and form != "plain":
        why = "over a cache of FP8 with a window, sinks or a soft cap"
    group = request.num_heads // request.num_kv_heads
    if group > most:
        return _argument("query heads of a KV head", f"at most {most} in a decode, {why}", group)
    return None


def _argument(what: str, required: str, found: int) -> Reason:
    return Reason(what=what, required=required, found=str(found), kind=ReasonKind.ARGUMENT)


def rows_of(request: AttentionRequest) -> int:
    """Rows of a tile of a decode: the query heads of a cached head, padded."""
    return group_rows(request.num_heads // request.num_kv_heads)


def form_of_request(request: AttentionRequest) -> str:
    """The compiled form that judges a request, and whose tiles it is launched with."""
    return form_of(
        has_window=bool(request.window),
        has_sinks=request.has_sinks,
        has_softcap=bool(request.softcap),
    )
