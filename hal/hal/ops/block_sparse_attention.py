"""Attention of a prompt over a paged KV cache by lists of key blocks that something chose.

Each block of queries and cached head has its list, which all query heads of the cached head share
(https://arxiv.org/abs/2502.11089, section 3.4; the same form serves
https://arxiv.org/abs/2407.02490 and https://arxiv.org/abs/2502.13189). With a window a query also
sees its last keys, in the same softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.checks import entries_read, positive, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.kv_formats import slots_of
from hal.ops.masking import accumulation_dtype, listed, softmax_of_seen
from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseAttentionRequest(OpRequest):
    """q[T, H * head_dim] -> out[T, H * v_head_dim], causal.

    query_block: queries of a sequence that share a list, 1 for a list a query. key_block: keys of
    a block. num_selected: places of a list. window: last keys, its own among them, that a query
    sees besides its list; 0 is none. block_size: rows of a page of the cache. Raises RequestError
    if inconsistent.
    """

    op: ClassVar[str] = "block_sparse_attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    query_block: int
    key_block: int
    num_selected: int
    block_size: int
    dtype: str
    window: int = 0
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        require(
            "block_sparse_attention request",
            *positive(
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim,
                query_block=self.query_block,
                key_block=self.key_block,
                num_selected=self.num_selected,
                block_size=self.block_size,
            ),
            (
                "num_heads a multiple of num_kv_heads",
                f"{self.num_heads} and {self.num_kv_heads}",
                self.num_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            ),
            ("window >= 0", self.window, self.window >= 0),
        )


@dataclass(slots=True)
class BlockSparseMetadata:
    """Which rows of q and which lists belong to which sequence. All int32, on the device.

    query_start_loc: [B+1], seq_lens: [B] (context including the new tokens), block_table:
    [B, max_blocks]. list_start_loc: [B+1], of ceil(queries / query_block) lists for each sequence;
    the first list is that of its first new token.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    list_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int


def reference(request: BlockSparseAttentionRequest, *, scale: float) -> Callable[..., torch.Tensor]:
    """Golden attention: kernel(q, k_cache[N, P, Hk, D], v_cache[N, P, Hk, Dv], lists, meta) in
    float32 (float64 for float64 q).

    lists: int32 [lists of the batch, Hk, num_selected] numbers of key blocks of the query's own
    sequence, none of them twice; negative ones and ones that begin after the query are padding. A
    query that sees no key is zero.
    """
    import torch

    def kernel(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        lists: torch.Tensor,
        meta: BlockSparseMetadata,
    ) -> torch.Tensor:
        out = q.new_zeros((q.shape[0], request.num_heads * request.v_head_dim))
        starts, firsts = meta.query_start_loc.tolist(), meta.list_start_loc.tolist()
        dtype = accumulation_dtype(q)
        for i, seq_len in enumerate(meta.seq_lens.tolist()):
            span = slice(starts[i], starts[i + 1])
            queries = span.stop - span.start
            if not queries:
                continue
            keys, values = (
                rows_of(c, meta.block_table[i], seq_len, request.block_size).to(dtype)
                for c in (k_cache, v_cache)
            )
            at = torch.arange(seq_len - queries, seq_len, device=q.device)
            own = torch.arange(queries, device=q.device) // request.query_block
            chosen = lists[firsts[i] : firsts[i + 1]][own]  # [Q, Hk, num_selected]
            seen = [_seen(request, chosen[:, h], at, seq_len) for h in range(chosen.shape[1])]
            rows = q[span].to(dtype).view(queries, request.num_heads, request.head_dim)
            out[span] = attend_groups(rows, keys, values, seen, scale).flatten(1).to(q.dtype)
        return out

    return kernel


def rows_of(cache: torch.Tensor, table: torch.Tensor, count: int, block_size: int) -> torch.Tensor:
    """The first `count` rows [count, Hk, D] of a sequence in a cache [N, P, Hk, D]."""
    import torch

    slots = slots_of(table, torch.arange(count, device=cache.device), block_size)
    return cache.flatten(0, 1)[slots]


def attend_groups(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: list[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """[Q, H, Dv] of rows [Q, H, D] over keys [S, Hk, D]; seen: bool [Q, S] for each cached head."""
    import torch

    groups = rows.shape[1] // keys.shape[1]
    parts = []
    for h, mask in enumerate(seen):
        scores = torch.einsum("qgd,kd->gqk", rows[:, h * groups : (h + 1) * groups], keys[:, h])
        weights = softmax_of_seen(scores * scale, mask)
        parts.append(torch.einsum("gqk,kd->qgd", weights, values[:, h]))
    return torch.cat(parts, dim=1)


def _seen(
    request: BlockSparseAttentionRequest, chosen: torch.Tensor, at: torch.Tensor, seq_len: int
) -> torch.Tensor:
    """bool [Q, seq_len]: keys that queries at these positions see."""
    import torch

    blocks = listed(chosen, -(-seq_len // request.key_block))
    seen = blocks.repeat_interleave(request.key_block, dim=1)[:, :seq_len]
    distance = at[:, None] - torch.arange(seq_len, device=at.device)
    return (seen | (distance < request.window)) & (distance >= 0)


def pairs(request: BlockSparseAttentionRequest, tokens: int) -> float:
    """Query-key pairs of one call, of lists that are full and do not overlap with the window."""
    most = request.num_selected * request.key_block + request.window
    return entries_read(request.phase, tokens, request.context_tokens, most=most)


def flops(request: BlockSparseAttentionRequest, tokens: int) -> float:
    return (
        2.0 * request.num_heads * (request.head_dim + request.v_head_dim) * pairs(request, tokens)
    )


def bytes_moved(request: BlockSparseAttentionRequest, tokens: int) -> float:
    """A prompt's rows are read once for all its queries, decode reads those of each query."""
    dims, size = request.head_dim + request.v_head_dim, DTYPE_BYTES[request.dtype]
    rows = pairs(request, tokens) if request.phase == "decode" else float(tokens)
    lists = -(-tokens // request.query_block) * request.num_kv_heads * request.num_selected
    return (request.num_kv_heads * rows + request.num_heads * tokens) * dims * size + 4 * lists


FAMILY = OpFamily(
    name="block_sparse_attention",
    request_type=BlockSparseAttentionRequest,
    summary="Attention of a prompt over listed blocks of a paged KV cache",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
