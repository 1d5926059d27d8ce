"""Scores of the sparse-attention indexer over paged keys in Triton.

Suffixes of tensor names: T query rows, D heads side by side, H heads, E entries, B sequences, W
columns of the block table. The products of a tile of keys with all heads of a query never leave the
registers: only the sum over the heads is written.

Scored are `width` entries from `offset` on or, IS_LISTED, those of the query's candidate blocks, in
the order of its list and one query a program. A tile of which no query sees anything is left as it
is, since a choice reads what its query sees; where it is the whole result, -inf is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import (
    FP4,
    FP8,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    fnuz_of_e4m3,
    pages_of,
)

_LIST_ENTRIES = tl.constexpr(8)  # of a candidate block


@triton.jit
def scored_entries(
    candidates_N_ptr, places, offset, complete, width, IS_LISTED: tl.constexpr
):  # fmt: skip
    """(entries at places of the result, which of them exist): `complete` is none."""
    if IS_LISTED:
        block = tl.load(candidates_N_ptr + places // _LIST_ENTRIES, mask=places < width, other=-1)
        entries = tl.where(block >= 0, block * _LIST_ENTRIES + places % _LIST_ENTRIES, complete)
    else:
        entries = offset + places
    return entries, entries < complete


@triton.jit
def _key_tile(
    keys_ptr, scales_ptr, page, row, inside, stride_page, stride_row, stride_scale_page,
    scale_start, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_FORMAT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_N, BLOCK_D] as the matrix unit takes them, and what their scores are scaled by.

    UNIT: "bf16" widens (exactly), "fn" and "fnuz" are the FP8 units.
    """
    base = keys_ptr + (page * stride_page + row * stride_row)[:, None]
    scale = tl.full((BLOCK_N,), 1.0, dtype=tl.float32)
    if KEY_FORMAT == FP4:
        offs_b = tl.arange(0, BLOCK_D // 2)
        packed = tl.load(base + offs_b[None, :], mask=inside[:, None], other=0).to(tl.int16)
        codes = tl.join(packed & 0xF, packed >> 4).reshape(BLOCK_N, BLOCK_D // 32, 32)
        offs_g = tl.arange(0, BLOCK_D // 32)
        at = page * stride_scale_page + scale_start + row * (BLOCK_D // 32)
        groups = scales_ptr + at[:, None] + offs_g[None, :]
        powers = decode_ue8m0(tl.load(groups, mask=inside[:, None], other=127))
        keys = (decode_e2m1(codes) * powers[:, :, None]).to(tl.bfloat16)
        keys = keys.reshape(BLOCK_N, BLOCK_D)
    elif KEY_FORMAT == FP8:
        offs_d = tl.arange(0, BLOCK_D)
        bits = tl.load(base + offs_d[None, :], mask=inside[:, None], other=0)
        at = page * stride_scale_page + scale_start + row
        scale = tl.load(scales_ptr + at, mask=inside, other=1.0)
        if UNIT == "fnuz":
            keys = fnuz_of_e4m3(bits)
            scale *= 2.0
        elif UNIT == "fn":
            keys = bits.to(tl.float8e4nv, bitcast=True)
        else:
            keys = decode_e4m3(bits).to(tl.bfloat16)
    else:
        offs_d = tl.arange(0, BLOCK_D)
        held = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
        keys = tl.load(base + offs_d[None, :], mask=held, other=0.0)
    return keys, scale


@triton.jit
def _query_tile(q_ptrs, held, Q_IS_FP8: tl.constexpr, UNIT: tl.constexpr):
    """Heads [BLOCK_H, BLOCK_D] of a query as the matrix unit takes them."""
    if Q_IS_FP8:
        bits = tl.load(q_ptrs, mask=held, other=0)
        if UNIT == "fnuz":
            q = fnuz_of_e4m3(bits)
        elif UNIT == "fn":
            q = bits.to(tl.float8e4nv, bitcast=True)
        else:
            q = decode_e4m3(bits).to(tl.bfloat16)
    else:
        q = tl.load(q_ptrs, mask=held, other=0.0)
    return q


@triton.jit
def _index_logits_kernel(
    q_TD_ptr, weights_TH_ptr, keys_ptr, scales_ptr, out_TE_ptr, candidates_TN_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, width, offset, is_whole,
    stride_q, stride_weights, stride_out, stride_candidates, stride_table, stride_page,
    stride_row, stride_scale_page, scale_start,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr,
    KEY_FORMAT: tl.constexpr, Q_IS_FP8: tl.constexpr, UNIT: tl.constexpr, IS_LISTED: tl.constexpr,
):  # fmt: skip
    """Program (tile of entries, tile of queries, sequence). The keys are read once for the queries
    of the tile. Keys are the rows of the product, so that it has enough of them for any unit, and
    the sum over the heads stays within a row. Offsets of scales are in elements of scales_ptr."""
    sequence = tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    length = tl.load(lengths_B_ptr + sequence)
    first = tl.program_id(1) * BLOCK_Q
    if first >= queries:
        return
    last = tl.minimum(first + BLOCK_Q, queries)
    context = length - queries
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_TE_ptr + (start + first).to(tl.int64) * stride_out + offs_n
    complete = (context + last) // RATIO
    candidates = candidates_TN_ptr + (start + first).to(tl.int64) * stride_candidates
    entries, inside = scored_entries(candidates, offs_n, offset, complete, width, IS_LISTED)
    if IS_LISTED:
        if tl.max(inside.to(tl.int32), axis=0) == 0:
            return
    elif offset + tl.program_id(0) * BLOCK_N >= complete:
        if is_whole:
            nothing = tl.full((BLOCK_N,), -float("inf"), dtype=tl.float32)
            for _ in range(first, last):
                tl.store(out_ptrs, nothing, mask=offs_n < width)
                out_ptrs += stride_out
        return
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    page = pages_of(table, entries, inside, PAGE)
    keys, key_scale = _key_tile(
        keys_ptr, scales_ptr, page, entries % PAGE, inside,
        stride_page, stride_row, stride_scale_page, scale_start,
        HEAD_DIM, BLOCK_D, BLOCK_N, KEY_FORMAT, UNIT,
    )  # fmt: skip
    if Q_IS_FP8 and UNIT == "fnuz":
        key_scale *= 2.0
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    heads = offs_h < HEADS
    held = heads[:, None] & (offs_d < HEAD_DIM)[None, :]
    row = (start + first).to(tl.int64)
    q_ptrs = q_TD_ptr + row * stride_q + offs_h[:, None] * HEAD_DIM + offs_d[None, :]
    weight_ptrs = weights_TH_ptr + row * stride_weights + offs_h
    for query in range(first, last):
        q = _query_tile(q_ptrs, held, Q_IS_FP8, UNIT)
        weights = tl.load(weight_ptrs, mask=heads, other=0.0).to(tl.float32)
        products = tl.dot(keys, tl.trans(q))
        # Of relu and NaN: a comparison keeps it, a maximum would not.
        products = tl.where(products < 0.0, 0.0, products)
        scores = tl.sum(products * weights[None, :], axis=1) * key_scale * scale
        seen = entries < (context + query + 1) // RATIO
        tl.store(out_ptrs, tl.where(seen, scores, -float("inf")), mask=offs_n < width)
        q_ptrs += stride_q
        weight_ptrs += stride_weights
        out_ptrs += stride_out
