"""Which indexer scores the Triton kernel computes. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.kv_formats import PLAIN_FORMATS
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.index_logits.triton_variants import config_of
from hal_kernels.mla_attention.row_dtypes import dtype_reasons

_KERNEL = "index_logits.paged"
_MOST_HEADS = 64  # what the stored machine code keeps in registers
_MOST_DIM = 128


def not_supported_reasons(
    request: IndexLogitsRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
    is_listed: bool = False,
) -> Sequence[Reason]:
    """Empty if the kernel serves and its machine code is of an allowed tier. is_listed: in the form
    that scores the entries of candidate blocks alone."""
    is_fp8 = request.dtype == "float8_e4m3fn"
    misfit = [] if is_fp8 else dtype_reasons(_KERNEL, request.dtype, {request.key_format})
    if misfit:
        return misfit
    if is_fp8 and request.key_format in PLAIN_FORMATS:
        required = "fp8_132 or fp4_68"
        return [not_written(_KERNEL, "keys of an FP8 query", required, request.key_format)]
    for what, found, most in (
        ("num_heads", request.num_heads, _MOST_HEADS),
        ("head_dim", request.head_dim, _MOST_DIM),
    ):
        if found > most:
            return [
                Reason(
                    what=what,
                    required=f"at most {most}",
                    found=str(found),
                    kind=ReasonKind.ARGUMENT,
                )
            ]
    fp8 = "fp8_e4m3fnuz" if device.arch.startswith("gfx94") else "fp8_e4m3fn"
    return evidence_reasons(
        "index_logits.fp4" if is_fp8 and request.key_format == "fp4_68" else _KERNEL,
        device,
        dtype=fp8 if is_fp8 else request.dtype,
        config=config_of(
            request.key_format, is_decode=request.phase == "decode", is_listed=is_listed
        ),
        allowed=allowed,
    )
