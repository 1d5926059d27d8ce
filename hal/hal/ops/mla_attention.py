"""Multi-head latent attention in absorbed form over paged latent rows, dense or by index lists.

Of https://arxiv.org/abs/2405.04434: each token caches one row [kv_lora_rank | rope_dim] that all
heads share; with W_UK folded into the query and W_UV into the output, a head is a dot product with
the row and a weighted sum of its latent part. The lists are DeepSeek sparse attention's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from hal.ops.checks import entries_read, one_of, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS, read_rows, slots_of
from hal.ops.masking import accumulation_dtype, listed, softmax_of_seen
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch

    from hal.ops.attention import AttentionMetadata

MlaKvFormat = Literal["bf16", "fp16", "fp8_656"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaAttentionRequest(OpRequest):
    """q[T, H * (kv_lora_rank + rope_dim)] over latent rows -> out[T, H * kv_lora_rank].

    top_k: 0 attends to all keys; otherwise each query has a list of so many positions of its own
    sequence, padded with -1. context_tokens: the context length that estimates assume. Raises
    RequestError if inconsistent.
    """

    op: ClassVar[str] = "mla_attention"

    num_heads: int
    kv_lora_rank: int
    rope_dim: int  # 0: no rotary part
    block_size: int
    dtype: str
    kv_format: MlaKvFormat
    top_k: int = 0
    is_causal: bool = True
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            "mla_attention request",
            one_of("kv_format", self.kv_format, get_args(MlaKvFormat)),
            *positive(
                num_heads=self.num_heads,
                kv_lora_rank=self.kv_lora_rank,
                block_size=self.block_size,
            ),
            (
                "rope_dim >= 0 and top_k >= 0",
                (self.rope_dim, self.top_k),
                min(self.rope_dim, self.top_k) >= 0,
            ),
            (
                "kv_lora_rank 512 and rope_dim 64 for fp8_656",
                (self.kv_lora_rank, self.rope_dim),
                self.kv_format in PLAIN_FORMATS or (self.kv_lora_rank, self.rope_dim) == (512, 64),
            ),
        )

    @property
    def row_dim(self) -> int:
        """Values of a latent row, and of a query head."""
        return self.kv_lora_rank + self.rope_dim


def reference(request: MlaAttentionRequest, *, scale: float) -> Callable[..., torch.Tensor]:
    """Golden attention: kernel(q, kv_cache, meta, indices=None) in float32 (float64 for float64 q).

    q: heads of [kv_lora_rank | rope_dim]. kv_cache: of `hal.ops.kv_formats`. meta:
    `AttentionMetadata`. indices: int32 [T, top_k] positions in the query's own sequence, none of
    them twice; negative ones, ones beyond the sequence and, if causal, after the query are padding.
    A query that sees no key is zero. Raises ValueError if lists are given and the request has none,
    or the reverse.
    """
    import torch

    def kernel(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _check_lists(request, indices)
        out = q.new_zeros((q.shape[0], request.num_heads * request.kv_lora_rank))
        starts = meta.query_start_loc.tolist()
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            span = slice(starts[i], starts[i + 1])
            if span.start == span.stop:
                continue
            positions = torch.arange(seq_len, device=q.device)
            slots = slots_of(meta.block_table[i], positions, request.block_size)
            rows = read_rows(
                request.kv_format, kv_cache, request.block_size, slots, accumulation_dtype(q)
            )
            seen = _seen(request, span.stop - span.start, positions, indices, span)
            out[span] = _attend(request, q[span], rows, seen, scale)
        return out

    return kernel


def _check_lists(request: MlaAttentionRequest, indices: torch.Tensor | None) -> None:
    found = 0 if indices is None else indices.shape[1]
    if found != request.top_k:
        raise ValueError(
            f"mla_attention: required index lists of {request.top_k} entries (0: none), "
            f"found {found}"
        )


def _seen(
    request: MlaAttentionRequest,
    queries: int,
    positions: torch.Tensor,
    indices: torch.Tensor | None,
    span: slice,
) -> torch.Tensor:
    """bool [queries, keys] of one sequence, whose last tokens are the queries."""
    seen = positions[None, :] >= 0
    if indices is not None:
        seen = listed(indices[span], len(positions))
    if request.is_causal:
        seen = seen & (positions[None, :] <= positions[len(positions) - queries :, None])
    return seen.expand(queries, -1)


def _attend(
    request: MlaAttentionRequest,
    q: torch.Tensor,
    rows: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    import torch

    heads = q.to(rows.dtype).view(q.shape[0], request.num_heads, request.row_dim)
    scores = torch.einsum("qhd,kd->hqk", heads, rows) * scale
    weights = softmax_of_seen(scores, seen)
    latent = rows[:, : request.kv_lora_rank]
    return torch.einsum("hqk,kd->qhd", weights, latent).flatten(1).to(q.dtype)


def _pairs(request: MlaAttentionRequest, tokens: int) -> float:
    if request.phase != "decode" and not request.is_causal:
        return float(tokens * (min(tokens, request.top_k) if request.top_k else tokens))
    return entries_read(request.phase, tokens, request.context_tokens, most=request.top_k)


def flops(request: MlaAttentionRequest, tokens: int) -> float:
    per_pair = 2.0 * request.num_heads * (request.row_dim + request.kv_lora_rank)
    return per_pair * _pairs(request, tokens)


def bytes_moved(request: MlaAttentionRequest, tokens: int) -> float:
    """Decode reads the rows of each query; a prompt's rows are read once for all its queries."""
    row = KV_FORMATS[request.kv_format].row_bytes(request.row_dim)
    rows = _pairs(request, tokens) if request.phase == "decode" else float(tokens)
    heads = tokens * request.num_heads * (request.row_dim + request.kv_lora_rank)
    lists = tokens * request.top_k * 4
    return rows * row + heads * DTYPE_BYTES[request.dtype] + lists


FAMILY = OpFamily(
    name="mla_attention",
    request_type=MlaAttentionRequest,
    summary="Latent attention (MLA, absorbed) over paged rows, dense or by index lists",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
