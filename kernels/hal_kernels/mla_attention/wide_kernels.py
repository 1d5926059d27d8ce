"""Latent attention with 64 heads a program in Triton: the rows that Hopper's wgmma multiplies.

As `triton_kernels`, for whole tiles of 64 heads. The sums of 64 heads take half of all registers,
so the loop keeps nothing that it can compute again: the compiler would hoist an address of the
query's memory for each product, and spill them. Suffixes of tensor names: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import pages_of
from hal_kernels.mla_attention.shared_rows import (
    query_chunks,
    softmax_step,
    store_heads,
    weighted_sums,
)
from hal_kernels.mla_attention.triton_kernels import _latent_chunk, split_bounds


@triton.jit
def _mla_attention_wide_kernel(
    q_TD_ptr, rows_ptr, scales_ptr, tails_ptr, indices_TK_ptr,
    out_ptr, peak_THS_ptr, total_THS_ptr, starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, num_splits, stride_q, stride_indices, stride_table, stride_page, stride_row,
    stride_scale_page, stride_scale_row, scale_start,
    stride_tail_page, stride_tail_row, tail_start,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence and split of its keys, block of heads, sequence); arguments
    as of `_mla_attention_kernel`. HEADS is a multiple of BLOCK_H, and ROPE is not 0."""
    query = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    sequence = tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    if query >= queries:
        return
    length = tl.load(lengths_B_ptr + sequence)
    seen = length
    if IS_CAUSAL:
        seen = length - queries + query + 1
    first, end = 0, seen
    if TOP_K > 0:
        end = TOP_K
    if not IS_WHOLE:
        first, end = split_bounds(end, split, num_splits, SPLIT, BLOCK_N)
    token = (start + query).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = head < HEADS
    offs_c, offs_r = tl.arange(0, CHUNK), tl.arange(0, BLOCK_R)
    q_ptrs = q_TD_ptr + token * stride_q + head[:, None] * (RANK + ROPE)
    q = query_chunks(q_ptrs, heads, RANK, CHUNK, CHUNKS)
    rotary = heads[:, None] & (offs_r < ROPE)[None, :]
    q_rope = tl.load(q_ptrs + RANK + offs_r[None, :], mask=rotary, other=0.0)
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    accs = ()
    for _ in tl.static_range(CHUNKS):
        accs = accs + (tl.zeros((BLOCK_H, CHUNK), dtype=tl.float32),)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for key in tl.range(first, end, BLOCK_N, disable_licm=True):
        positions = key + tl.arange(0, BLOCK_N)
        if TOP_K > 0:
            listed = indices_TK_ptr + token * stride_indices + positions
            if TOP_K % BLOCK_N == 0:
                positions = tl.load(listed)  # no tile goes beyond the list
            else:
                positions = tl.load(listed, mask=positions < end, other=-1)
            visible = (positions >= 0) & (positions < seen)
            positions = tl.where(visible, positions, 0)
        else:
            visible = positions < end
        places = positions.to(tl.uint32)  # none is negative: a page is a shift away
        page, row = pages_of(table, places, visible, PAGE), places % PAGE
        at = page * stride_tail_page + row * stride_tail_row + tail_start
        tails = tails_ptr + at[:, None] + offs_r[None, :]
        in_tail = visible[:, None] & (offs_r < ROPE)[None, :]
        scores = tl.dot(q_rope, tl.trans(tl.load(tails, mask=in_tail, other=0.0)))
        tiles = ()
        for chunk in tl.static_range(CHUNKS):
            tile = _latent_chunk(
                rows_ptr, scales_ptr, page, row, chunk * CHUNK + offs_c, visible,
                stride_page, stride_row, stride_scale_page, stride_scale_row, scale_start,
                chunk * CHUNK, RANK, CHUNK, BLOCK_N, IS_PACKED,
            )  # fmt: skip
            scores = tl.dot(q[chunk], tl.trans(tile), scores)
            tiles = tiles + (tile,)
        weights, decay, peak, total = softmax_step(scores * scale, visible, peak, total)
        accs = weighted_sums(accs, weights, tiles, decay, CHUNKS)
    at_head = token * HEADS + head
    if not IS_WHOLE:
        at_head = at_head * num_splits + split
    store_heads(
        out_ptr, peak_THS_ptr, total_THS_ptr, accs, peak, total, at_head, heads,
        RANK, CHUNK, CHUNKS, IS_WHOLE,
    )  # fmt: skip
