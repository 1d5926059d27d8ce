"""Scores of the indexer and the choice among them as one call, without a score of every pair.

What `index_logits` and `index_top_k` do one after the other. Between them stands one float32 for
each query and entry: 32 GiB for 8,192 queries of a context of a million. One call may choose as it
scores, and score the candidate blocks alone where the choice is limited to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hal.ops import index_logits, index_top_k
from hal.ops.checks import entries_read, require
from hal.ops.formats import DTYPE_BYTES
from hal.ops.index_logits import IndexKeyFormat, IndexLogitsRequest
from hal.ops.index_top_k import CANDIDATE_BLOCK_ENTRIES, IndexTopKRequest
from hal.ops.kv_formats import KV_FORMATS
from hal.ops.request import OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    import torch

    from hal.ops.attention import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSelectionRequest(OpRequest):
    """q[T, H * head_dim], weights float32 [T, H] -> indices int32 [T, width], padded with -1.

    The arguments of `IndexLogitsRequest` and of `IndexTopKRequest`. A query sees the entries that
    are complete at its token. pool_size: a part of compress_ratio, so that indices are in units of
    compress_ratio / pool_size tokens. Raises RequestError if inconsistent.
    """

    op: ClassVar[str] = "index_selection"

    num_heads: int
    head_dim: int
    key_format: IndexKeyFormat
    block_size: int
    dtype: str
    top_k: int
    compress_ratio: int = 1
    context_tokens: int = 1024
    pool_size: int = 1
    candidate_blocks: int = 0
    publishes_candidates: bool = False

    def __post_init__(self) -> None:
        _ = self.logits, self.choice  # check the rest
        require(
            "index_selection request",
            (
                f"compress_ratio a multiple of pool_size {self.pool_size}",
                self.compress_ratio,
                self.compress_ratio % self.pool_size == 0,
            ),
        )

    @property
    def logits(self) -> IndexLogitsRequest:
        """The scores alone."""
        return IndexLogitsRequest(
            phase=self.phase,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            key_format=self.key_format,
            block_size=self.block_size,
            dtype=self.dtype,
            compress_ratio=self.compress_ratio,
            context_tokens=self.context_tokens,
        )

    @property
    def choice(self) -> IndexTopKRequest:
        """The choice alone."""
        return IndexTopKRequest(
            phase=self.phase,
            tokens=self.tokens,
            graph_mode=self.graph_mode,
            top_k=self.top_k,
            context_tokens=self.context_tokens,
            compress_ratio=self.compress_ratio // self.pool_size,
            pool_size=self.pool_size,
            candidate_blocks=self.candidate_blocks,
            publishes_candidates=self.publishes_candidates,
        )

    @property
    def is_limited(self) -> bool:
        """Whether the choice is among blocks that an earlier layer published."""
        return self.candidate_blocks > 0 and not self.publishes_candidates

    @property
    def width(self) -> int:
        """Columns of the index list."""
        return self.choice.width


def reference(request: IndexSelectionRequest, *, scale: float) -> Callable[..., Any]:
    """Golden: kernel(q, weights, key_cache, meta, candidates=None) -> indices, or (indices,
    candidates) where the request publishes them; the two golden ops one after the other.

    Rows of q that belong to no sequence see nothing: their lists are padding. Raises ValueError if
    candidates are given and the request is not limited to some, or the reverse.
    """
    score = index_logits.reference(request.logits, scale=scale)
    choose = index_top_k.reference(request.choice)

    def kernel(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        candidates: torch.Tensor | None = None,
    ) -> Any:
        logits = score(q, weights, key_cache, meta)
        return choose(logits, _seen(request, meta, len(q)), candidates)

    return kernel


def _seen(request: IndexSelectionRequest, meta: AttentionMetadata, rows: int) -> torch.Tensor:
    """int32 [rows]: what `index_top_k` calls visible."""
    import torch

    seen = torch.zeros(rows, dtype=torch.int32, device=meta.seq_lens.device)
    starts = meta.query_start_loc.tolist()
    for i, seq_len in enumerate(meta.seq_lens.tolist()):
        queries = starts[i + 1] - starts[i]
        at = torch.arange(seq_len - queries, seq_len, device=seen.device)
        tokens = request.compress_ratio // request.pool_size
        seen[starts[i] : starts[i + 1]] = ((at + 1) // tokens).to(torch.int32)
    return seen


def scored_pairs(request: IndexSelectionRequest, tokens: int) -> float:
    """Query-entry pairs that need a score: of a limited choice those of its blocks."""
    most = request.candidate_blocks * CANDIDATE_BLOCK_ENTRIES if request.is_limited else 0
    return entries_read(request.phase, tokens, request.context_tokens, request.compress_ratio, most)


def flops(request: IndexSelectionRequest, tokens: int) -> float:
    products = 2.0 * request.num_heads * (request.head_dim + 1)
    return products * scored_pairs(request, tokens) + index_top_k.flops(request.choice, tokens)


def bytes_moved(request: IndexSelectionRequest, tokens: int) -> float:
    """Queries, weights, the keys (a prompt's once) and the lists: no score has to be stored."""
    pairs = scored_pairs(request, tokens)
    keys = pairs if request.phase == "decode" else float(tokens // request.compress_ratio)
    query = request.num_heads * (request.head_dim * DTYPE_BYTES[request.dtype] + 4)
    row = KV_FORMATS[request.key_format].row_bytes(request.head_dim)
    lists = request.width + request.candidate_blocks
    return tokens * (query + lists * 4) + keys * row


FAMILY = OpFamily(
    name="index_selection",
    request_type=IndexSelectionRequest,
    summary="Indexer scores and the choice of the largest, in one call",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances={"int32": Tolerance(0.0, 0.0)},
)
