"""The largest indexer scores of each query in Triton, exactly, by a radix search.

Suffixes of tensor names: T query rows, E entries, C columns of the index list, N blocks of entries.
A score's bits, with those of negative ones turned over, are an integer of the same order. Four
passes each find eight bits of the smallest chosen one, by a histogram of the scores that share the
bits found before; a last one writes the list. Nothing is kept of a row but the histogram, so its
length is not limited.
"""

from __future__ import annotations

import triton
import triton.language as tl

_BLOCK_ENTRIES = tl.constexpr(8)  # of a candidate block


@triton.jit
def ordered_bits(scores):
    """Integers in the order of the scores."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def digits_with(keys, is_score, prefix, SHIFT: tl.constexpr):
    """How many of the scores that share the bits above SHIFT + 8 have each value of the next eight:
    int32 [256]. The sign is the highest bit."""
    if SHIFT == 24:
        digit = (keys >> 24) + 128
    else:
        digit = (keys >> SHIFT) & 0xFF
        is_score &= (keys >> (SHIFT + 8)) == prefix
    return tl.histogram(digit, 256, mask=is_score)


@triton.jit
def next_prefix(counts, prefix, needed, SHIFT: tl.constexpr):
    """(prefix with eight more bits, how many of the scores that have it are needed), by how many
    have each digit. If there are fewer scores than needed, it is the least digit."""
    digits = tl.arange(0, 256)
    from_here = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    found = tl.max(tl.where(from_here >= needed, digits, 0), axis=0)
    above = tl.sum(tl.where(digits > found, counts, 0), axis=0)
    if SHIFT == 24:
        prefix = found - 128
    else:
        prefix = prefix * 256 + found
    return prefix, needed - above


@triton.jit
def _scores_at(
    logits_E_ptr, candidates_N_ptr, first, count, end, readable, BLOCK: tl.constexpr,
    IS_LIMITED: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    """(integers in the order of the scores, which may be chosen, entries) at BLOCK places of a row
    from `first` on, which are entries or, limited, those of the candidate blocks. NaN and -inf are
    never chosen. BY_PLACE: the scores are those of the candidate blocks alone, in the order of
    their list. Loaded are the `readable` columns of a row, since wide loads end nowhere else; what
    is no entry is left out."""
    if IS_LIMITED:
        number = first // _BLOCK_ENTRIES + tl.arange(0, BLOCK // _BLOCK_ENTRIES)
        listed = number < count // _BLOCK_ENTRIES
        block = tl.load(candidates_N_ptr + number, mask=listed, other=-1)
        is_block = (block >= 0) & (block * _BLOCK_ENTRIES < end)
        block = tl.where(is_block, block, 0)
        members = tl.arange(0, _BLOCK_ENTRIES)[None, :]
        entries = block[:, None] * _BLOCK_ENTRIES + members
        offsets = (number if BY_PLACE else block)[:, None] * _BLOCK_ENTRIES + members
        held = is_block[:, None] & (offsets < readable)
        scores = tl.load(logits_E_ptr + offsets, mask=held, other=-float("inf"))
        entries = tl.where(is_block[:, None], entries, end)
        scores = tl.where(entries < end, scores, -float("inf")).reshape(BLOCK)
        entries = entries.reshape(BLOCK)
    else:
        entries = first + tl.arange(0, BLOCK)
        scores = tl.load(logits_E_ptr + entries, mask=entries < readable, other=-float("inf"))
        scores = tl.where(entries < end, scores, -float("inf"))
    return ordered_bits(scores), scores > -float("inf"), entries


@triton.jit
def _digit(
    logits_E_ptr, candidates_N_ptr, count, end, readable, prefix, needed, least,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, IS_LIMITED: tl.constexpr, IS_TIE: tl.constexpr,
    BY_PLACE: tl.constexpr,
):  # fmt: skip
    """(prefix with eight more bits, how many of the scores that have it are needed).

    prefix: the bits above SHIFT + 8 of the smallest chosen key. If there are fewer scores than
    needed, the least digit is taken and all are chosen. IS_TIE: among the scores equal to `least`,
    the search is for the lowest indices.
    """
    counts = tl.zeros((256,), dtype=tl.int32)
    for first in range(0, count, BLOCK):
        keys, is_score, entries = _scores_at(
            logits_E_ptr, candidates_N_ptr, first, count, end, readable, BLOCK, IS_LIMITED, BY_PLACE
        )
        if IS_TIE:
            is_score &= keys == least
            keys = -entries
        counts += digits_with(keys, is_score, prefix, SHIFT)
    return next_prefix(counts, prefix, needed, SHIFT)


@triton.jit
def _smallest_chosen(
    logits_E_ptr, candidates_N_ptr, count, end, readable, needed, least,
    BLOCK: tl.constexpr, IS_LIMITED: tl.constexpr, IS_TIE: tl.constexpr,
    BY_PLACE: tl.constexpr,
):  # fmt: skip
    """(key of the smallest chosen score, how many of those that share it are chosen)."""
    key = 0
    key, needed = _digit(
        logits_E_ptr, candidates_N_ptr, count, end, readable, key, needed, least,
        24, BLOCK, IS_LIMITED, IS_TIE, BY_PLACE,
    )  # fmt: skip
    key, needed = _digit(
        logits_E_ptr, candidates_N_ptr, count, end, readable, key, needed, least,
        16, BLOCK, IS_LIMITED, IS_TIE, BY_PLACE,
    )  # fmt: skip
    key, needed = _digit(
        logits_E_ptr, candidates_N_ptr, count, end, readable, key, needed, least,
        8, BLOCK, IS_LIMITED, IS_TIE, BY_PLACE,
    )  # fmt: skip
    return _digit(
        logits_E_ptr, candidates_N_ptr, count, end, readable, key, needed, least,
        0, BLOCK, IS_LIMITED, IS_TIE, BY_PLACE,
    )  # fmt: skip


@triton.jit
def _index_top_k_kernel(
    logits_TE_ptr, visible_T_ptr, candidates_TN_ptr, out_TC_ptr,
    entries, readable, stride_logits, stride_candidates, stride_out,
    TOP_K: tl.constexpr, POOL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr, CANDIDATES: tl.constexpr, BY_PLACE: tl.constexpr,
):  # fmt: skip
    """Program (query row). Of equal scores the lower index is chosen.

    POOL tokens stand behind an entry; then the list names tokens, and those of the open pool follow
    behind TOP_K columns. BLOCK_P >= POOL is a power of two. CANDIDATES: blocks that the choice is
    limited to, each named once, -1 is padding; 0 is no limit. BY_PLACE: a row holds the scores of
    those blocks alone. `readable` columns of each row may be loaded. Scores are searched BLOCK at a
    time and lists written of BLOCK_OUT.
    """
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_T_ptr + row)
    end = tl.minimum(visible // POOL, entries)
    count = end
    if CANDIDATES > 0:
        count = CANDIDATES * _BLOCK_ENTRIES
    logits = logits_TE_ptr + row * stride_logits
    candidates = candidates_TN_ptr + row * stride_candidates
    out = out_TC_ptr + row * stride_out
    least, ties = _smallest_chosen(
        logits, candidates, count, end, readable, TOP_K // POOL, 0, BLOCK, CANDIDATES > 0, False,
        BY_PLACE,
    )  # fmt: skip
    if CANDIDATES > 0:
        # The blocks are in no order, so a count of equal scores does not say which is lower.
        lowest, _ = _smallest_chosen(
            logits, candidates, count, end, readable, ties, least, BLOCK, True, True, BY_PLACE
        )
    offs_p = tl.arange(0, BLOCK_P)
    in_pool = (offs_p < POOL)[None, :]
    written, equal = 0, 0
    for first in range(0, count, BLOCK_OUT):
        keys, is_score, found = _scores_at(
            logits, candidates, first, count, end, readable, BLOCK_OUT, CANDIDATES > 0, BY_PLACE
        )
        is_equal = is_score & (keys == least)
        if CANDIDATES > 0:
            is_taken = is_equal & (-found >= lowest)
        else:
            is_taken = is_equal & (equal + tl.cumsum(is_equal.to(tl.int32), axis=0) <= ties)
            equal += tl.sum(is_equal.to(tl.int32), axis=0)
        chosen = (is_score & (keys > least)) | is_taken
        is_one = chosen.to(tl.int32)
        slots = written + tl.cumsum(is_one, axis=0) - is_one
        ptrs = out + slots[:, None] * POOL + offs_p[None, :]
        tl.store(ptrs, found[:, None] * POOL + offs_p[None, :], mask=chosen[:, None] & in_pool)
        written += tl.sum(is_one, axis=0)
    for first in range(written * POOL, TOP_K, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(out + offs, tl.full((BLOCK,), -1, dtype=tl.int32), mask=offs < TOP_K)
    if POOL > 1:
        tail = visible // POOL * POOL + offs_p
        tail = tl.where(tail < visible, tail, -1)
        tl.store(out + TOP_K + offs_p, tail, mask=offs_p < POOL - 1)


@triton.jit
def _block_maxima_kernel(
    logits_TE_ptr, visible_T_ptr, maxima_TN_ptr, counts_T_ptr, blocks, readable, stride_logits,
    stride_maxima, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (query row, tile of blocks): the largest score of each block, +inf for the newest
    one, and how many blocks the query sees. `readable` columns of each row may be loaded."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_T_ptr + row)
    block = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    entries = block[:, None] * _BLOCK_ENTRIES + tl.arange(0, _BLOCK_ENTRIES)[None, :]
    ptrs = logits_TE_ptr + row * stride_logits + entries
    scores = tl.load(ptrs, mask=entries < readable, other=-float("inf"))
    is_seen = (entries < visible) & (scores == scores)
    best = tl.max(tl.where(is_seen, scores, -float("inf")), axis=1)
    is_newest = (visible > 0) & (block == (visible - 1) // _BLOCK_ENTRIES)
    best = tl.where(is_newest, float("inf"), best)
    tl.store(maxima_TN_ptr + row * stride_maxima + block, best, mask=block < blocks)
    if tl.program_id(1) == 0:
        tl.store(counts_T_ptr + row, (visible + _BLOCK_ENTRIES - 1) // _BLOCK_ENTRIES)
