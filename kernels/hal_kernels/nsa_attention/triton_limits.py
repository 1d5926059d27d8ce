"""Which native sparse attention the Triton kernels compute. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.ops.nsa_attention import NsaAttentionRequest
from hal.reasons import Reason
from hal_kernels.aot.evidence import EvidenceTier
from hal_kernels.aot.limits import evidence_reasons, not_written
from hal_kernels.block_sparse_attention.triton_limits import MOST_GROUP, argument
from hal_kernels.nsa_attention.triton_variants import HEAD_DIMS, PLACES, padded

_DTYPES = ("bfloat16", "float16")
_LEAST_KEYS = 16
_MOST_RATIO = 16


def not_supported_reasons(
    request: NsaAttentionRequest,
    device: DeviceSpec,
    *,
    allowed: Sequence[EvidenceTier] = ("native",),
) -> Sequence[Reason]:
    """Empty if the kernels serve and the machine code of each is of an allowed tier."""
    if request.dtype not in _DTYPES:
        return [
            not_written("nsa_attention", "dtype", " or ".join(_DTYPES), request.dtype),
        ]
    reasons = _arguments(request)
    if reasons:
        return reasons
    widest = padded(max(request.head_dim, request.v_head_dim), HEAD_DIMS)
    places = padded(request.num_selected, PLACES)
    is_decode = request.phase == "decode"
    suffix = "-fp16" if request.dtype == "float16" else ""
    branches = ("split",) if is_decode else ("selected", "window")
    needed = [
        ("entries", request.dtype, f"d{widest}-{'split' if is_decode else 'whole'}"),
        ("select", request.dtype, f"d{widest}-n{places}"),
        ("lists", "", f"n{places}"),
        *(("branch", request.dtype, f"d{widest}-{form}") for form in branches),
        *([("merge", "", f"d{widest}{suffix}")] if is_decode else []),
    ]
    return [
        reason
        for kernel, dtype, config in needed
        for reason in evidence_reasons(
            f"nsa_attention.{kernel}", device, dtype=dtype, config=config, allowed=allowed
        )
    ]


def _arguments(request: NsaAttentionRequest) -> list[Reason]:
    group = request.num_heads // request.num_kv_heads
    widest = max(request.head_dim, request.v_head_dim)
    ratio = request.select_size // request.compress_stride
    return [
        argument(what, required, found)
        for what, required, found, is_met in (
            ("head_dim", f"at most {HEAD_DIMS[-1]}", widest, widest <= HEAD_DIMS[-1]),
            ("heads of a cached head", f"at most {MOST_GROUP}", group, group <= MOST_GROUP),
            (
                "num_selected",
                f"at most {PLACES[-1]}",
                request.num_selected,
                request.num_selected <= PLACES[-1],
            ),
            (
                "select_size",
                f"a multiple of {_LEAST_KEYS}",
                request.select_size,
                request.select_size % _LEAST_KEYS == 0,
            ),
            (
                "select_size / compress_stride",
                f"a power of two, at most {_MOST_RATIO}",
                ratio,
                ratio <= _MOST_RATIO and ratio & (ratio - 1) == 0,
            ),
        )
        if not is_met
    ]
