"""Choice of blocks by importance in Triton: formulas 8 to 11 of https://arxiv.org/abs/2502.11089.

A block and its importance are one integer key, so that the largest keys are the choice: the bits of
a float that is not negative, which are ordered as it is, before the block's number, of which the
lower is the larger key. -1 is no block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.block_sparse_attention.grouped_rows import load_keys

_LAST_BLOCK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def keys_of(scores, blocks):
    """int64 of importances (float32, NaN is none) and block numbers of one shape."""
    bits = tl.where(scores >= 0.0, scores, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (-blocks + _LAST_BLOCK).to(tl.int64)


@triton.jit
def blocks_of(keys):
    """int32 block numbers; -1 for none."""
    blocks = -(keys & 0x7FFFFFFF).to(tl.int32) + _LAST_BLOCK
    return tl.where(keys >= 0, blocks, -1)


@triton.jit
def with_larger(best, more):
    """The largest of two sets of keys [Q, N] and [Q, M] per row, as [Q, N] by falling size. No key
    is twice in them but -1; `best` is in falling order.

    Each key's place is the number of larger ones: comparisons alone, no exchange of values.
    """
    places = tl.arange(0, best.shape[1])
    in_front = tl.sum((more[:, None, :] > best[:, :, None]).to(tl.int32), axis=2)
    above = tl.sum((more[:, None, :] > more[:, :, None]).to(tl.int32), axis=2)
    place_of_best = places[None, :] + in_front
    place_of_more = above + tl.sum((best[:, None, :] > more[:, :, None]).to(tl.int32), axis=2)
    is_best = place_of_best[:, None, :] == places[None, :, None]
    is_more = place_of_more[:, None, :] == places[None, :, None]
    return tl.maximum(
        tl.max(tl.where(is_best, best[:, None, :], -1), axis=2),
        tl.max(tl.where(is_more, more[:, None, :], -1), axis=2),
    )


@triton.jit
def entry_shares(
    q, k_ptr, table_W_ptr, entries, inside, count, base, share, scale, stride_page, stride_row,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Probabilities of entries [BLOCK_Q, entries], summed over the heads of a query. base, share:
    [rows] maximum of the scores and inverse of the sum, 0 for rows that there are not."""
    keys = load_keys(
        k_ptr, table_W_ptr, entries, inside, stride_page, stride_row, HEAD_DIM, BLOCK_D, PAGE
    )
    scores = tl.dot(q, tl.trans(keys)) * scale - base[:, None]
    visible = inside[None, :] & (entries[None, :] < count[:, None])
    shares = tl.exp2(tl.where(visible, scores, -float("inf"))) * share[:, None]
    return tl.sum(shares.reshape(BLOCK_Q, BLOCK_G, entries.shape[0]), axis=1)


@triton.jit
def block_importance(
    q, k_ptr, table_W_ptr, first, end, count, base, share, scale, stride_page, stride_row,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr,
    HALO: tl.constexpr,
):  # fmt: skip
    """Formula 9 for BLOCK_S blocks from `first` on: [BLOCK_Q, BLOCK_S].

    It counts an entry once for each of its OVERLAP strides that lies in the block: RATIO entries
    begin in a block, the last OVERLAP - 1 of which reach into the next one. Those that reach in
    from before are the block's halo, HALO places of which the last count. `end`: entries of all
    queries of the tile.
    """
    place = tl.arange(0, BLOCK_S * RATIO)
    entries = first * RATIO + place
    shares = entry_shares(
        q, k_ptr, table_W_ptr, entries, entries < end, count, base, share, scale,
        stride_page, stride_row, HEAD_DIM, BLOCK_D, PAGE, BLOCK_Q, BLOCK_G,
    )  # fmt: skip
    weights = OVERLAP - tl.maximum(place % RATIO + OVERLAP - RATIO, 0)
    weighted = shares * weights.to(tl.float32)[None, :]
    importance = tl.sum(weighted.reshape(BLOCK_Q, BLOCK_S, RATIO), axis=2)
    if OVERLAP > 1:
        place = tl.arange(0, BLOCK_S * HALO)
        weights = place % HALO - (HALO - OVERLAP)
        entries = (first + place // HALO) * RATIO - HALO + place % HALO
        inside = (entries >= 0) & (entries < end) & (weights > 0)
        shares = entry_shares(
            q, k_ptr, table_W_ptr, entries, inside, count, base, share, scale,
            stride_page, stride_row, HEAD_DIM, BLOCK_D, PAGE, BLOCK_Q, BLOCK_G,
        )  # fmt: skip
        weighted = shares * weights.to(tl.float32)[None, :]
        importance += tl.sum(weighted.reshape(BLOCK_Q, BLOCK_S, HALO), axis=2)
    return importance
