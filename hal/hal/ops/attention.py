"""Attention over a paged KV cache: prefill chunks and single-token decode.

Grouped-query attention (https://arxiv.org/abs/2305.13245) over blocks
(https://arxiv.org/abs/2309.06180), with sliding window (https://arxiv.org/abs/2310.06825),
per-head sinks (https://arxiv.org/abs/2309.17453, as a logit in the denominator) and soft-capped
scores (https://arxiv.org/abs/2408.00118).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.errors import RequestError
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_write import check_scales, scales_of_fp8
from hal.ops.request import FLOAT_TOLERANCES, LARGEST_ERRORS, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest(OpRequest):
    """Attention of `num_heads` query heads over `num_kv_heads` cached heads.

    window: keys a query sees including itself; 0 is all. softcap: c of c*tanh(s/c); 0 is none.
    context_tokens: the context length that estimates assume. has_kv_scales: caches of FP8 hold keys
    divided by a scale and values divided by another one, as `KvWriteRequest` writes them. Raises
    RequestError if inconsistent.
    """

    op: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    dtype: str
    kv_dtype: str
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    context_tokens: int = 1024
    has_kv_scales: bool = False

    def __post_init__(self) -> None:
        for required, found, is_met in (
            scales_of_fp8(self.kv_dtype, self.has_kv_scales),
            (
                "num_heads a multiple of num_kv_heads",
                f"{self.num_heads} and {self.num_kv_heads}",
                self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            (
                "window >= 0 and softcap >= 0",
                f"{self.window} and {self.softcap}",
                self.window >= 0 and self.softcap >= 0,
            ),
            ("causal attention for a window", "is_causal=False", self.is_causal or not self.window),
        ):
            if not is_met:
                raise RequestError("attention request", required, str(found), "correct the request")


@dataclass(slots=True)
class AttentionMetadata:
    """Which rows of q belong to which sequence, and where its keys are. All int32, on the device.

    query_start_loc: [B+1], seq_lens: [B] (context including the new tokens), block_table:
    [B, max_blocks]. The two host numbers bound the loops without reading device memory.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


def reference(
    request: AttentionRequest,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Callable[..., torch.Tensor]:
    """Golden attention: one sequence at a time, scores in float32 (float64 for float64 inputs).

    Raises ValueError if sinks are given and the request has none, or the reverse, and for scales
    that it does not have.
    """
    check_scales("attention", request.has_kv_scales, k_scale, v_scale)
    if (sinks is not None) != request.has_sinks:
        raise ValueError(
            f"attention: required sinks as has_sinks={request.has_sinks} says, "
            f"found {'none' if sinks is None else list(sinks.shape)}"
        )

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        out = q.new_empty((q.shape[0], request.num_heads * request.v_head_dim))
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            start, end = starts[i], starts[i + 1]
            if end == start:
                continue
            blocks = meta.block_table[i, : -(-seq_len // request.block_size)].long()
            keys = k_cache[blocks].flatten(0, 1)[:seq_len]
            values = v_cache[blocks].flatten(0, 1)[:seq_len]
            rows = q[start:end].reshape(end - start, request.num_heads, request.head_dim)
            attended = _attend(request, rows, keys, values, scale * k_scale, sinks, v_scale)
            out[start:end] = attended.flatten(1)
        return out

    return kernel


def _attend(
    request: AttentionRequest,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    v_scale: float = 1.0,
) -> torch.Tensor:
    import torch

    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    groups = request.num_heads // request.num_kv_heads
    keys = k.to(dtype).repeat_interleave(groups, dim=1)
    values = v.to(dtype).repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), keys) * scale
    if request.softcap:
        scores = request.softcap * torch.tanh(scores / request.softcap)
    if request.is_causal:
        query_at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
        key_at = torch.arange(k.shape[0], device=q.device)[None, :]
        hidden = key_at > query_at
        if request.window:
            hidden |= key_at <= query_at - request.window
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.to(dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (torch.einsum("hqk,khd->qhd", weights, values) * v_scale).to(q.dtype)


def _keys_read(request: AttentionRequest, tokens: int) -> float:
    """Query-key pairs of one call: decode sees the context, prefill is one whole prompt."""
    window = request.window
    if request.phase == "decode":
        context = max(request.context_tokens, 1)
        return float(tokens * (min(context, window) if window else context))
    if not request.is_causal:
        return float(tokens * tokens)
    seen = min(tokens, window) if window else tokens
    return seen * (seen + 1) / 2 + float((tokens - seen) * seen)


def flops_of_pairs(request: AttentionRequest, pairs: float) -> float:
    """Of a call that scores so many query-key pairs."""
    return 2.0 * request.num_heads * (request.head_dim + request.v_head_dim) * pairs


def bytes_of_rows(request: AttentionRequest, tokens: int, rows: float) -> float:
    """Of a call with so many queries that reads so many rows of keys and values."""
    dims = request.head_dim + request.v_head_dim
    kv = request.num_kv_heads * dims * DTYPE_BYTES[request.kv_dtype] * rows
    return kv + tokens * request.num_heads * dims * DTYPE_BYTES[request.dtype]


def flops(request: AttentionRequest, tokens: int) -> float:
    return flops_of_pairs(request, _keys_read(request, tokens))


def bytes_moved(request: AttentionRequest, tokens: int) -> float:
    rows = _keys_read(request, tokens) if request.phase == "decode" else float(tokens)
    return bytes_of_rows(request, tokens, rows)


FAMILY = OpFamily(
    name="attention",
    request_type=AttentionRequest,
    summary="Attention over a paged KV cache",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
    largest_errors={**LARGEST_ERRORS, "float16": 2.0**-9},
)
