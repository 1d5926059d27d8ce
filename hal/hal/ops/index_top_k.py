"""Choice of the entries that sparse attention reads: the largest indexer scores of each query.

Of equal scores the lower index wins. Pools (GLM-5.3-Flash) are chosen whole, and the open tail is
always added; candidate blocks (DeepSeek-V4.1) narrow the choice of later layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hal.ops.checks import entries_read, positive, require
from hal.ops.request import OpFamily, OpRequest, Tolerance

if TYPE_CHECKING:
    pass

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
    raise NotImplementedError


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
