"""Binds the Triton indexer, scores and choice in one call, to requests.

Scores are kept of one piece of the entries at a time (`pieces`), and merged into each query's
running choice. The number of launches follows from the longest sequence that the metadata allows,
so it is the same in a captured graph; a query leaves the pieces behind its last entry at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.index_selection import IndexSelectionRequest
from hal.ops.index_top_k import CANDIDATE_BLOCK_ENTRIES
from hal_kernels.index_logits.triton import LaunchScores, bind_scores
from hal_kernels.index_selection.pieces import piece_size, scores_candidates_alone
from hal_kernels.index_selection.triton_kernels import (
    _mark_kernel,
    _merge_kernel,
    _piece_maxima_kernel,
    _visible_kernel,
)
from hal_kernels.index_selection.triton_variants import MARK_BLOCK, MAXIMA_BLOCKS, VISIBLE_QUERIES
from hal_kernels.index_top_k.triton import bind_radix
from hal_kernels.index_top_k.triton_variants import tiles


def bind(request: IndexSelectionRequest, device: DeviceSpec, *, scale: float) -> Callable[..., Any]:
    """As the op's reference: kernel(q, weights, key_cache, meta, candidates=None) -> int32 [T,
    width], with int32 [T, candidate_blocks] where the request publishes them. Lists are by rising
    index, those among candidates by the order of the blocks."""
    launch = bind_scores(request.logits, device, scale=scale)
    select = (_bind_alone if scores_candidates_alone(request) else _bind_pieces)(request, launch)

    def kernel(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        candidates: torch.Tensor | None = None,
    ) -> Any:
        if (candidates is not None) != request.is_limited:
            raise ValueError(
                f"index_selection: required {'' if request.is_limited else 'no '}candidates, "
                f"found {'none' if candidates is None else list(candidates.shape)}"
            )
        return select(q, weights, key_cache, meta, candidates)

    return kernel


def _bind_alone(request: IndexSelectionRequest, launch: LaunchScores) -> Callable[..., Any]:
    """Only the entries of the candidate blocks are scored."""
    choose = bind_radix(request.top_k, 1, request.candidate_blocks, is_by_place=True)
    columns = request.candidate_blocks * CANDIDATE_BLOCK_ENTRIES

    def select(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        candidates: torch.Tensor,
    ) -> torch.Tensor:
        scores = torch.empty((q.shape[0], columns), dtype=torch.float32, device=q.device)
        launch(q, weights, key_cache, meta, scores, candidates=candidates)
        return choose(scores, _visible(request, meta, q.shape[0]), candidates)

    return select


def _bind_pieces(request: IndexSelectionRequest, launch: LaunchScores) -> Callable[..., Any]:
    def select(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        candidates: torch.Tensor | None,
    ) -> Any:
        tokens, entries = q.shape[0], meta.max_seq_len // request.compress_ratio
        size = piece_size(tokens, entries)
        pieces = -(-max(1, entries) // size)
        scores = torch.empty((tokens, size), dtype=torch.float32, device=q.device)
        visible = _visible(request, meta, tokens)
        choice = _RunningChoice(request.top_k, request.pool_size, scores, pieces)
        marks = None if candidates is None else _Marks(candidates, size)
        blocks = _BlockChoice(request, scores, pieces) if request.publishes_candidates else None
        for number in range(pieces):
            offset = number * size
            launch(q, weights, key_cache, meta, scores, offset=offset)
            if marks is not None:
                marks.set(number, offset)
            choice.merge(scores, visible, number, entries, None if marks is None else marks.marks)
            if blocks is not None:
                blocks.merge(scores, visible, number, entries)
        return choice.out if blocks is None else (choice.out, blocks.choice.out)

    return select


def _visible(request: IndexSelectionRequest, meta: AttentionMetadata, tokens: int) -> torch.Tensor:
    """int32 [T]: what each query sees, nothing for rows that belong to no sequence."""
    visible = torch.zeros((tokens,), dtype=torch.int32, device=meta.seq_lens.device)
    grid = (-(-meta.max_query_len // VISIBLE_QUERIES), meta.seq_lens.shape[0])
    if tokens and min(grid):
        _visible_kernel[grid](
            meta.query_start_loc, meta.seq_lens, visible,
            TOKENS=request.compress_ratio // request.pool_size, BLOCK=VISIBLE_QUERIES,
        )  # fmt: skip
    return visible


class _RunningChoice:
    """The choice among the pieces that were merged, and the lists, int32 [T, top_k + pool - 1]."""

    def __init__(self, top_k: int, pool: int, scores: torch.Tensor, pieces: int) -> None:
        tokens, device = scores.shape[0], scores.device
        self.out = torch.empty((tokens, top_k + pool - 1), dtype=torch.int32, device=device)
        self._kept = top_k // pool
        # Read and written in turn; the last piece writes lists only, so two pieces need one.
        shape, turns = (tokens, self._kept), min(2, pieces - 1)
        self._turns = [
            (
                torch.empty(shape, dtype=torch.float32, device=device),
                torch.empty(shape, dtype=torch.int32, device=device),
            )
            for _ in range(turns)
        ] or [(scores, self.out)]
        self._constants = {
            "TOP_K": top_k,
            "POOL": pool,
            "BLOCK_P": triton.next_power_of_2(pool),
            **tiles(pool),
        }

    def merge(
        self,
        scores: torch.Tensor,
        visible: torch.Tensor,
        number: int,
        entries: int,
        marks: torch.Tensor | None = None,
    ) -> None:
        """Merges the scores [T, size] of a piece; the first one has number 0."""
        tokens, size = scores.shape
        if not tokens:
            return
        kept_scores, kept = self._turns[(number - 1) % len(self._turns)]
        new_scores, new = self._turns[number % len(self._turns)]
        stamps = self.out if marks is None else marks
        _merge_kernel[(tokens,)](
            scores, stamps, visible, kept_scores, kept, new_scores, new, self.out,
            number * size, size, entries, self._kept if number else 0, number + 1,
            scores.stride(0), stamps.stride(0), self.out.stride(0),
            IS_MARKED=marks is not None, **self._constants,
        )  # fmt: skip


class _Marks:
    """int32 [T, blocks of a piece]: which of its blocks a query may choose from."""

    def __init__(self, candidates: torch.Tensor, size: int) -> None:
        self._candidates, self._size = candidates, size
        shape = (candidates.shape[0], size // CANDIDATE_BLOCK_ENTRIES)
        self.marks = torch.zeros(shape, dtype=torch.int32, device=candidates.device)

    def set(self, number: int, offset: int) -> None:
        """Those of one piece have the stamp number + 1."""
        rows = self._candidates
        if rows.shape[0]:
            _mark_kernel[(rows.shape[0],)](
                rows, self.marks, offset, self._size, number + 1,
                rows.stride(0), self.marks.stride(0),
                CANDIDATES=rows.shape[1], BLOCK=MARK_BLOCK,
            )  # fmt: skip


class _BlockChoice:
    """The candidate blocks that are published: those of the largest scores, and the newest."""

    def __init__(self, request: IndexSelectionRequest, scores: torch.Tensor, pieces: int) -> None:
        tokens, size = scores.shape
        shape = (tokens, size // CANDIDATE_BLOCK_ENTRIES)
        self._maxima = torch.empty(shape, dtype=torch.float32, device=scores.device)
        self._counts = torch.empty((tokens,), dtype=torch.int32, device=scores.device)
        self.choice = _RunningChoice(request.candidate_blocks, 1, self._maxima, pieces)

    def merge(self, scores: torch.Tensor, visible: torch.Tensor, number: int, entries: int) -> None:
        tokens, size = scores.shape
        blocks = self._maxima.shape[1]
        if not tokens:
            return
        _piece_maxima_kernel[(tokens, -(-blocks // MAXIMA_BLOCKS))](
            scores, visible, self._maxima, self._counts, number * size, blocks,
            scores.stride(0), BLOCK_N=MAXIMA_BLOCKS,
        )  # fmt: skip
        total = -(-entries // CANDIDATE_BLOCK_ENTRIES)
        self.choice.merge(self._maxima, self._counts, number, total)
