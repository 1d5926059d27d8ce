"""Which attention over window and entries the Triton kernel computes. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.compressed_attention import CompressedAttentionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.compressed_attention.triton_variants import MERGE, V41_MAIN, is_whole
from hal_kernels.mla_attention.row_dtypes import dtype_reasons

_KERNEL = "compressed_attention.paged"
_FORMATS = ("bf16", "fp16", "v4_584")
_MOST_DIM = 512


def not_supported_reasons(
    request: CompressedAttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernel serves, its machine code is of an allowed tier and, of a decode that is
    split, that of the kernel which merges its splits is native."""
    main = request.main_format if request.compress_ratio else request.window_format
    misfit = dtype_reasons(_KERNEL, request.dtype, {request.window_format, main})
    if misfit:
        return misfit
    is_v41 = request.window_format == "v41_528" and main in V41_MAIN
    if not is_v41 and (request.window_format not in _FORMATS or main not in _FORMATS):
        found = f"{request.window_format} and {main}"
        required = "bf16, fp16, v4_584, or v41_528 with entries in v41_528 or fp4_288"
        return [not_written(_KERNEL, "rows", required, found)]
    if not is_v41 and request.window_format != main:
        found = f"{request.window_format} and {main}"
        return [not_written(_KERNEL, "formats of the two caches", "one format", found)]
    if request.head_dim > _MOST_DIM:
        return [
            Reason(
                what="head_dim",
                required=f"at most {_MOST_DIM}",
                found=str(request.head_dim),
                kind=ReasonKind.ARGUMENT,
            )
        ]
    # What one program sees whole is launched as a prompt is.
    one_program = is_whole(
        is_decode=request.phase == "decode",
        top_k=request.top_k,
        compress_ratio=request.compress_ratio,
    )
    phase = "prefill" if one_program else "decode"
    # The window alone is a part of the form without lists.
    form = "sparse" if request.top_k else "dense"
    kernel = "compressed_attention.v41" if is_v41 else _KERNEL
    attends = evidence_reasons(
        kernel, device, dtype=request.dtype, config=f"{main}-{form}-{phase}", allowed=allowed
    )
    if one_program:
        return attends
    return attends + evidence_reasons("compressed_attention.merge", device, dtype="", config=MERGE)
