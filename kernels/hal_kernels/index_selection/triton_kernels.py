"""The running choice of each query in Triton: scores of some entries are merged into it, exactly.

Suffixes of tensor names: T query rows, B sequences, E entries of a piece, K places of the running
choice, C columns of the index list, N candidate blocks. A query's running choice is at most K
entries with their scores, by rising index and padded with -inf. With the scores of the next piece
behind it, it is one row for the radix search of `index_top_k`, in which of equal scores the lower
index comes first: so the result is that of one search over all scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.index_top_k.triton_kernels import digits_with, next_prefix, ordered_bits

_BLOCK_ENTRIES = tl.constexpr(8)  # of a candidate block


@triton.jit
def _row_scores(
    kept_K_ptr, scores_E_ptr, marks_N_ptr, at, kept, count, size, stamp, IS_MARKED: tl.constexpr
):  # fmt: skip
    """Scores at places of a row: the running choice, then `count` scores of the piece, of which
    IS_MARKED leaves those whose block has the stamp. What is behind them is loaded up to the end of
    the piece, since wide loads end nowhere else, and left out."""
    place = at - kept
    inside = (place >= 0) & (place < size)
    scores = tl.load(scores_E_ptr + place, mask=inside, other=-float("inf"))
    scores = tl.where(place < count, scores, -float("inf"))
    if IS_MARKED:
        marks = tl.load(marks_N_ptr + place // _BLOCK_ENTRIES, mask=inside, other=0)
        scores = tl.where(marks == stamp, scores, -float("inf"))
    before = tl.load(kept_K_ptr + at, mask=at < kept, other=-float("inf"))
    return tl.where(at < kept, before, scores)


@triton.jit
def _row_digit(
    kept_K_ptr, scores_E_ptr, marks_N_ptr, kept, count, size, stamp, prefix, needed,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, IS_MARKED: tl.constexpr,
):  # fmt: skip
    """(eight more bits of the smallest chosen key, how many scores that have them are needed)."""
    counts = tl.zeros((256,), dtype=tl.int32)
    for first in range(0, kept + count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        scores = _row_scores(
            kept_K_ptr, scores_E_ptr, marks_N_ptr, at, kept, count, size, stamp, IS_MARKED
        )
        counts += digits_with(ordered_bits(scores), scores > -float("inf"), prefix, SHIFT)
    return next_prefix(counts, prefix, needed, SHIFT)


@triton.jit
def _merge_kernel(
    scores_TE_ptr, marks_TN_ptr, visible_T_ptr, kept_scores_TK_ptr, kept_TK_ptr,
    new_scores_TK_ptr, new_TK_ptr, out_TC_ptr,
    offset, size, entries, kept, stamp, stride_scores, stride_marks, stride_out,
    TOP_K: tl.constexpr, POOL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr, IS_MARKED: tl.constexpr,
):  # fmt: skip
    """Program (query row). The piece is `size` entries from `offset` on; `kept` is the width of the
    running choice, TOP_K // POOL, or 0 at the first piece. The piece that holds the last entry that
    a query sees writes its list, as `_index_top_k_kernel` does; those behind it leave at once."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_T_ptr + row)
    end = tl.minimum(visible // POOL, entries)
    if (offset > 0) & (offset >= end):
        return
    is_last = offset + size >= end
    count = tl.minimum(end - offset, size)
    wanted = TOP_K // POOL
    scores_row = scores_TE_ptr + row * stride_scores
    marks_row = marks_TN_ptr + row * stride_marks
    kept_scores, kept_row = kept_scores_TK_ptr + row * wanted, kept_TK_ptr + row * wanted
    new_scores, new_row = new_scores_TK_ptr + row * wanted, new_TK_ptr + row * wanted
    out = out_TC_ptr + row * stride_out
    least, ties = _row_digit(
        kept_scores, scores_row, marks_row, kept, count, size, stamp, 0, wanted,
        24, BLOCK, IS_MARKED,
    )  # fmt: skip
    least, ties = _row_digit(
        kept_scores, scores_row, marks_row, kept, count, size, stamp, least, ties,
        16, BLOCK, IS_MARKED,
    )  # fmt: skip
    least, ties = _row_digit(
        kept_scores, scores_row, marks_row, kept, count, size, stamp, least, ties,
        8, BLOCK, IS_MARKED,
    )  # fmt: skip
    least, ties = _row_digit(
        kept_scores, scores_row, marks_row, kept, count, size, stamp, least, ties,
        0, BLOCK, IS_MARKED,
    )  # fmt: skip
    offs_p = tl.arange(0, BLOCK_P)
    in_pool = (offs_p < POOL)[None, :]
    written, equal = 0, 0
    for first in range(0, kept + count, BLOCK_OUT):
        at = first + tl.arange(0, BLOCK_OUT)
        scores = _row_scores(
            kept_scores, scores_row, marks_row, at, kept, count, size, stamp, IS_MARKED
        )
        keys, is_score = ordered_bits(scores), scores > -float("inf")
        is_equal = is_score & (keys == least)
        one_equal = is_equal.to(tl.int32)
        chosen = is_score & (keys > least)
        chosen |= is_equal & (equal + tl.cumsum(one_equal, axis=0) <= ties)
        equal += tl.sum(one_equal, axis=0)
        one = chosen.to(tl.int32)
        slots = written + tl.cumsum(one, axis=0) - one
        before = tl.load(kept_row + at, mask=chosen & (at < kept), other=0)
        found = tl.where(at < kept, before, offset + at - kept)
        if is_last:
            ptrs = out + slots[:, None] * POOL + offs_p[None, :]
            tl.store(ptrs, found[:, None] * POOL + offs_p[None, :], mask=chosen[:, None] & in_pool)
        else:
            tl.store(new_row + slots, found, mask=chosen)
            tl.store(new_scores + slots, scores, mask=chosen)
        written += tl.sum(one, axis=0)
    nothing = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    if is_last:
        for first in range(written * POOL, TOP_K, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            tl.store(out + offs, tl.full((BLOCK,), -1, dtype=tl.int32), mask=offs < TOP_K)
        if POOL > 1:
            tail = visible // POOL * POOL + offs_p
            tail = tl.where(tail < visible, tail, -1)
            tl.store(out + TOP_K + offs_p, tail, mask=offs_p < POOL - 1)
    else:
        for first in range(written, wanted, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            tl.store(new_scores + offs, nothing, mask=offs < wanted)


@triton.jit
def _visible_kernel(
    starts_B_ptr, lengths_B_ptr, visible_T_ptr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (tile of queries, sequence): what each query sees, in units of TOKENS tokens."""
    sequence = tl.program_id(1)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    context = tl.load(lengths_B_ptr + sequence) - queries
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = (context + query + 1) // TOKENS
    tl.store(visible_T_ptr + start + query, seen, mask=query < queries)


@triton.jit
def _mark_kernel(
    candidates_TN_ptr, marks_TN_ptr, offset, size, stamp, stride_candidates, stride_marks,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (query row): the stamp at the candidate blocks of a piece of `size` entries from
    `offset` on. Stamps of other pieces stay, so that nothing has to be cleared between them."""
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, CANDIDATES, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        ptrs = candidates_TN_ptr + row * stride_candidates + offs
        block = tl.load(ptrs, mask=offs < CANDIDATES, other=-1)
        place = block - offset // _BLOCK_ENTRIES
        inside = (block >= 0) & (place >= 0) & (place < size // _BLOCK_ENTRIES)
        stamps = tl.zeros((BLOCK,), dtype=tl.int32) + stamp
        tl.store(marks_TN_ptr + row * stride_marks + place, stamps, mask=inside)


@triton.jit
def _piece_maxima_kernel(
    scores_TE_ptr, visible_T_ptr, maxima_TN_ptr, counts_T_ptr, offset, blocks, stride_scores,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (query row, tile of the blocks of a piece): the largest score of each, +inf for the
    query's newest; and how many blocks the query sees in all."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_T_ptr + row)
    if tl.program_id(1) == 0:
        tl.store(counts_T_ptr + row, (visible + _BLOCK_ENTRIES - 1) // _BLOCK_ENTRIES)
    block = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if offset + tl.program_id(1) * BLOCK_N * _BLOCK_ENTRIES >= visible:
        return
    places = block[:, None] * _BLOCK_ENTRIES + tl.arange(0, _BLOCK_ENTRIES)[None, :]
    # Whole blocks are loaded, so that loads are wide; what the query does not see is left out.
    ptrs = scores_TE_ptr + row * stride_scores + places
    scores = tl.load(ptrs, mask=(block < blocks)[:, None], other=-float("inf"))
    counted = (offset + places < visible) & (scores == scores)
    best = tl.max(tl.where(counted, scores, -float("inf")), axis=1)
    newest = (visible - 1) // _BLOCK_ENTRIES
    best = tl.where(offset // _BLOCK_ENTRIES + block == newest, float("inf"), best)
    tl.store(maxima_TN_ptr + row * blocks + block, best, mask=block < blocks)
