"""The largest indexer scores of each query in Triton, exactly, by a radix search.

Suffixes of tensor names: T query rows, E entries, C columns of the index list. A score's bits, with
those of negative ones turned over, are an integer of the same order. Four passes each find eight
bits of the smallest chosen one, by a histogram of the scores that share the bits found before; a
fifth writes the list. Nothing is kept of a row but the histogram, so its length is not limited.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys_of(logits_E_ptr, offs, end):
    """(integers in the order of the scores, which may be chosen): not NaN, not -inf, not beyond."""
    scores = tl.load(logits_E_ptr + offs, mask=offs < end, other=-float("inf"))
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), scores > -float("inf")


@triton.jit
def _digit(logits_E_ptr, end, prefix, needed, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """(prefix with eight more bits, how many of the scores that have it are needed).

    prefix: the bits above SHIFT + 8 of the smallest chosen key. If there are fewer scores than
    needed, the least digit is taken and all are chosen.
    """
    digits = tl.arange(0, 256)
    counts = tl.zeros((256,), dtype=tl.int32)
    for first in range(0, end, BLOCK):
        keys, is_score = _keys_of(logits_E_ptr, first + tl.arange(0, BLOCK), end)
        if SHIFT == 24:
            digit = (keys >> 24) + 128  # the sign is the highest bit
        else:
            digit = (keys >> SHIFT) & 0xFF
            is_score &= (keys >> (SHIFT + 8)) == prefix
        counts += tl.histogram(digit, 256, mask=is_score)
    from_here = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    found = tl.max(tl.where(from_here >= needed, digits, 0), axis=0)
    above = tl.sum(tl.where(digits > found, counts, 0), axis=0)
    if SHIFT == 24:
        prefix = found - 128
    else:
        prefix = prefix * 256 + found
    return prefix, needed - above


@triton.jit
def _index_top_k_kernel(
    logits_TE_ptr, visible_T_ptr, out_TC_ptr, entries, stride_logits, stride_out,
    TOP_K: tl.constexpr, POOL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (query row). Of equal scores the lower index is chosen; the list is by rising index.
    POOL tokens stand behind an entry; then the list names tokens, and those of the open pool follow
    behind TOP_K columns. BLOCK_P >= POOL is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    visible = tl.load(visible_T_ptr + row)
    end = tl.minimum(visible // POOL, entries)
    logits = logits_TE_ptr + row * stride_logits
    out = out_TC_ptr + row * stride_out
    least, ties = _digit(logits, end, 0, TOP_K // POOL, 24, BLOCK)
    least, ties = _digit(logits, end, least, ties, 16, BLOCK)
    least, ties = _digit(logits, end, least, ties, 8, BLOCK)
    least, ties = _digit(logits, end, least, ties, 0, BLOCK)
    offs_p = tl.arange(0, BLOCK_P)
    in_pool = (offs_p < POOL)[None, :]
    written, equal = 0, 0
    for first in range(0, end, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        keys, is_score = _keys_of(logits, offs, end)
        is_equal = is_score & (keys == least)
        rank = equal + tl.cumsum(is_equal.to(tl.int32), axis=0)
        chosen = (is_score & (keys > least)) | (is_equal & (rank <= ties))
        count = chosen.to(tl.int32)
        slots = written + tl.cumsum(count, axis=0) - count
        ptrs = out + slots[:, None] * POOL + offs_p[None, :]
        tl.store(ptrs, offs[:, None] * POOL + offs_p[None, :], mask=chosen[:, None] & in_pool)
        written += tl.sum(count, axis=0)
        equal += tl.sum(is_equal.to(tl.int32), axis=0)
    for first in range(written * POOL, TOP_K, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(out + offs, tl.full((BLOCK,), -1, dtype=tl.int32), mask=offs < TOP_K)
    if POOL > 1:
        tail = visible // POOL * POOL + offs_p
        tail = tl.where(tail < visible, tail, -1)
        tl.store(out + TOP_K + offs_p, tail, mask=offs_p < POOL - 1)
