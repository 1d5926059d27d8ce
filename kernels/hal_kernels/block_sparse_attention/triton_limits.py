"""Which attention over listed blocks the Triton kernel computes. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written

_KERNEL = "block_sparse_attention.paged"
_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128, 256)
MOST_GROUP = 16  # query heads of a cached head: what the evidence is of
_LEAST_KEYS = 16
_MOST_PLACES = 4096  # of a list, which is looked at whole


def argument(what: str, required: str, found: object) -> Reason:
    """An argument that no form of the kernel takes."""
    return Reason(what=what, required=required, found=str(found), kind=ReasonKind.ARGUMENT)


def not_supported_reasons(
    request: BlockSparseAttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernel serves and its machine code is of an allowed tier."""
    if request.dtype not in _DTYPES:
        return [not_written(_KERNEL, "dtype", " or ".join(_DTYPES), request.dtype)]
    if request.phase == "decode":
        return [not_written(_KERNEL, "phase", "prefill: no splits of the keys", request.phase)]
    group = request.num_heads // request.num_kv_heads
    widest = max(request.head_dim, request.v_head_dim)
    reasons = [
        argument(what, required, found)
        for what, required, found, is_met in (
            ("head_dim", f"at most {_HEAD_DIMS[-1]}", widest, widest <= _HEAD_DIMS[-1]),
            ("heads of a cached head", f"at most {MOST_GROUP}", group, group <= MOST_GROUP),
            (
                "key_block",
                f"a multiple of {_LEAST_KEYS}",
                request.key_block,
                request.key_block % _LEAST_KEYS == 0,
            ),
            (
                "num_selected",
                f"at most {_MOST_PLACES:,}",
                request.num_selected,
                request.num_selected <= _MOST_PLACES,
            ),
        )
        if not is_met
    ]
    if reasons:
        return reasons
    size = next(size for size in _HEAD_DIMS if widest <= size)
    form = "token" if request.query_block == 1 else "block"
    return evidence_reasons(
        _KERNEL, device, dtype=request.dtype, config=f"d{size}-{form}", allowed=allowed
    )
