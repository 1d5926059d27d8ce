"""Choice of the entries that sparse attention reads: the largest indexer scores of each query.

Of equal scores the lower index wins. Pools (GLM-5.3-Flash) are chosen whole, and the open tail is
always added; candidate blocks (DeepSeek-V4.1) narrow the choice of later layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hal.ops.checks import entries_read, positive, require
from hal.ops.masking import listed
from hal.ops.request import OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    import torch

CANDIDATE_BLOCK_ENTRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTopKRequest(OpRequest):
    """logits float32 [T, entries] -> indices int32 [T, width], padded with -1.

    width: top_k, or top_k + pool_size - 1 with pools: then each logit is that of `pool_size`
    tokens, top_k / pool_size of them are chosen, and indices are tokens. candidate_blocks: the
    choice is among so many blocks of 8 entries that an earlier layer published (0: no limit); with
    publishes_candidates this call is the one that publishes them. Raises RequestError if
    inconsistent.
    """

    op: ClassVar[str] = "index_top_k"

    top_k: int
    context_tokens: int = 1024
    compress_ratio: int = 1
    pool_size: int = 1
    candidate_blocks: int = 0
    publishes_candidates: bool = False

    def __post_init__(self) -> None:
        require(
            "index_top_k request",
            *positive(
                top_k=self.top_k, compress_ratio=self.compress_ratio, pool_size=self.pool_size
            ),
            (
                f"top_k a multiple of pool_size {self.pool_size}",
                self.top_k,
                self.top_k % self.pool_size == 0,
            ),
            ("candidate_blocks >= 0", self.candidate_blocks, self.candidate_blocks >= 0),
            (
                "candidate_blocks to publish",
                self.candidate_blocks,
                self.candidate_blocks > 0 or not self.publishes_candidates,
            ),
            (
                "no pools with candidate blocks",
                self.pool_size,
                self.pool_size == 1 or not self.candidate_blocks,
            ),
            (
                "candidate blocks that hold top_k entries",
                f"{self.candidate_blocks} blocks of {CANDIDATE_BLOCK_ENTRIES} for {self.top_k}",
                not self.candidate_blocks
                or self.candidate_blocks * CANDIDATE_BLOCK_ENTRIES >= self.top_k,
            ),
        )

    @property
    def width(self) -> int:
        """Columns of the index list."""
        return self.top_k + self.pool_size - 1


def reference(request: IndexTopKRequest) -> Callable[..., Any]:
    """Golden choice by a stable sort: kernel(logits[T, entries], visible int32 [T],
    candidates=None) -> indices, or (indices, candidates) where the request publishes them.

    visible: entries that the query sees, the first ones; tokens where there are pools. candidates:
    int32 [T, candidate_blocks] block numbers, padded with -1. Published are the blocks with the
    largest score, and always the newest one. The order within a list is free for implementations;
    here it is by falling score. A score that is NaN or -inf is never chosen. Raises ValueError if
    candidates are given and the request is not limited to some, or the reverse.
    """
    is_limited = request.candidate_blocks > 0 and not request.publishes_candidates

    def kernel(
        logits: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None = None
    ) -> Any:
        if (candidates is not None) != is_limited:
            raise ValueError(
                f"index_top_k: required {'' if is_limited else 'no '}candidates, "
                f"found {'none' if candidates is None else list(candidates.shape)}"
            )
        scores = _seen_scores(request, logits, visible, candidates)
        chosen = _largest(scores, request.top_k // request.pool_size)
        if request.pool_size > 1:
            return _tokens_of_pools(request, chosen, visible)
        if request.publishes_candidates:
            return chosen, _newest_and_largest_blocks(request, scores, visible)
        return chosen

    return kernel


def _seen_scores(
    request: IndexTopKRequest,
    logits: torch.Tensor,
    visible: torch.Tensor,
    candidates: torch.Tensor | None,
) -> torch.Tensor:
    """The scores, -inf where the query may not choose."""
    import torch

    entries = logits.shape[1]
    seen = torch.arange(entries, device=logits.device) < visible[:, None] // request.pool_size
    if candidates is not None:
        blocks = listed(candidates, -(-entries // CANDIDATE_BLOCK_ENTRIES))
        seen &= blocks.repeat_interleave(CANDIDATE_BLOCK_ENTRIES, dim=1)[:, :entries]
    return logits.masked_fill(~seen | logits.isnan(), float("-inf"))


def _largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [T, count]: columns by falling score, of equal ones the lower first; -1 for -inf."""
    import torch
    import torch.nn.functional as functional

    values, order = scores.sort(dim=1, descending=True, stable=True)
    order = torch.where(values == float("-inf"), -1, order)[:, :count]
    return functional.pad(order, (0, count - order.shape[1]), value=-1).to(torch.int32)


def _tokens_of_pools(
    request: IndexTopKRequest, pools: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """The tokens of the chosen pools, then those of the pool that is still open."""
    import torch

    size = request.pool_size
    tokens = pools[:, :, None] * size + torch.arange(size, device=pools.device)
    tokens = torch.where(pools[:, :, None] >= 0, tokens, -1).flatten(1)
    tail = visible[:, None] // size * size + torch.arange(size - 1, device=pools.device)
    tail = torch.where(tail < visible[:, None], tail, -1)
    return torch.cat((tokens, tail), dim=1).to(torch.int32)


def _newest_and_largest_blocks(
    request: IndexTopKRequest, scores: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """int32 [T, candidate_blocks]: blocks by their largest score, the newest before all others."""
    import torch
    import torch.nn.functional as functional

    size = CANDIDATE_BLOCK_ENTRIES
    padded = functional.pad(scores, (0, -scores.shape[1] % size), value=float("-inf"))
    best = torch.unflatten(padded, 1, (-1, size)).amax(dim=2)
    has_any = visible > 0
    newest = (visible[has_any].long() - 1) // size
    best[has_any] = best[has_any].scatter(1, newest[:, None], float("inf"))
    return _largest(best, request.candidate_blocks)


def _logits(request: IndexTopKRequest, tokens: int) -> float:
    """Scores that are looked at: with published candidates only theirs."""
    most = 0
    if request.candidate_blocks and not request.publishes_candidates:
        most = request.candidate_blocks * CANDIDATE_BLOCK_ENTRIES
    ratio = request.compress_ratio * request.pool_size
    return entries_read(request.phase, tokens, request.context_tokens, ratio, most)


def flops(request: IndexTopKRequest, tokens: int) -> float:
    """One comparison of each score with a threshold."""
    return _logits(request, tokens)


def bytes_moved(request: IndexTopKRequest, tokens: int) -> float:
    lists = request.width + request.candidate_blocks
    return _logits(request, tokens) * 4 + tokens * (lists * 4 + 4)  # with the visible counts


FAMILY = OpFamily(
    name="index_top_k",
    request_type=IndexTopKRequest,
    summary="Index lists of the largest indexer scores",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances={"int32": Tolerance(0.0, 0.0)},
)
