"""Which latent attention the Triton kernel computes. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.mla_attention import MlaAttentionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons
from hal_kernels.mla_attention.row_dtypes import dtype_reasons
from hal_kernels.mla_attention.triton_variants import MERGE, config_of, is_wide

_KERNEL = "mla_attention.paged"
_WIDEST = 512, 64  # latent and rotary values of a row: what the stored machine code holds


def not_supported_reasons(
    request: MlaAttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernel serves, its machine code is of an allowed tier and, of a decode, that of
    the kernel which merges its splits is native."""
    misfit = dtype_reasons(_KERNEL, request.dtype, {request.kv_format})
    if misfit:
        return misfit
    widths = request.kv_lora_rank, request.rope_dim
    if widths[0] > _WIDEST[0] or widths[1] > _WIDEST[1]:
        return [
            Reason(
                what="row of the latent cache",
                required=f"at most {_WIDEST[0]} latent and {_WIDEST[1]} rotary values",
                found=f"{widths[0]} and {widths[1]}",
                kind=ReasonKind.ARGUMENT,
            )
        ]
    is_of_64 = is_wide(device.arch, request.num_heads, request.rope_dim)
    config = config_of(
        request.kv_format,
        is_sparse=bool(request.top_k),
        phase="decode" if request.phase == "decode" else "prefill",
        heads=16 if is_of_64 else request.num_heads,
    )
    attends = evidence_reasons(
        "mla_attention.wide" if is_of_64 else _KERNEL,
        device,
        dtype=request.dtype,
        config=config,
        allowed=allowed,
    )
    if request.phase != "decode":
        return attends
    return attends + evidence_reasons("mla_attention.merge", device, dtype="", config=MERGE)
