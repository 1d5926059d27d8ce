"""Latent attention in absorbed form over paged rows in Triton, dense or by index lists.

Suffixes of tensor names: T query rows, D heads of [latent | rope] side by side, B sequences, W
columns of the block table, K entries of a list, S splits, L latent width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_e4m3, pages_of
from hal_kernels.kv_write.unpacking import unpacked_once
from hal_kernels.mla_attention.shared_rows import (
    held_or_loaded,
    query_chunks,
    softmax_step,
    store_heads,
    weighted_sums,
)


@triton.jit
def _latent_chunk(
    rows_ptr, scales_ptr, page, row, offs, inside, stride_page, stride_row,
    stride_scale_page, stride_scale_row, scale_start, FIRST: tl.constexpr,
    RANK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """The columns offs, from FIRST on, of the latent parts of these rows [BLOCK_N, CHUNK], in
    bfloat16 where they are packed: then 128 of them share a scale."""
    held = inside[:, None] & (offs < RANK)[None, :]
    ptrs = rows_ptr + (page * stride_page + row * stride_row)[:, None] + offs[None, :]
    if IS_PACKED:
        GROUP: tl.constexpr = min(CHUNK, 128)
        values = decode_e4m3(tl.load(ptrs, mask=held, other=0))
        at = page * stride_scale_page + row * stride_scale_row + scale_start + FIRST // 128
        groups = scales_ptr + at[:, None] + tl.arange(0, CHUNK // GROUP)[None, :]
        scales = tl.load(groups, mask=inside[:, None], other=1.0)
        wide = values.reshape(BLOCK_N, CHUNK // GROUP, GROUP) * scales[:, :, None]
        latent = wide.to(tl.bfloat16).reshape(BLOCK_N, CHUNK)
    else:
        latent = tl.load(ptrs, mask=held, other=0.0)
    return latent


@triton.jit
def split_bounds(
    end, split, num_splits, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """First key of a split and the one behind its last, of keys up to `end`.

    Splits are of SPLIT keys, or of more where so many splits would not hold all: which depends on
    the query's own keys alone, so its result does not depend on the rest of the batch.
    """
    steps = tl.maximum(SPLIT // BLOCK_N, tl.cdiv(tl.cdiv(end, num_splits), BLOCK_N))
    each = steps * BLOCK_N
    return split * each, tl.minimum(end, (split + 1) * each)


@triton.jit
def _mla_attention_kernel(
    q_TD_ptr, rows_ptr, scales_ptr, tails_ptr, indices_TK_ptr,
    out_ptr, peak_THS_ptr, total_THS_ptr, starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, num_splits, stride_q, stride_indices, stride_table, stride_page, stride_row,
    stride_scale_page, stride_scale_row, scale_start,
    stride_tail_page, stride_tail_row, tail_start,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    IS_PACKED: tl.constexpr, IS_WHOLE: tl.constexpr, RELOADS_Q: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence and split of its keys, block of heads, sequence).

    IS_WHOLE: one program sees all keys of a query and writes out[T, HEADS * RANK]; otherwise
    out_ptr is part[T, H, S, L]. TOP_K 0: all positions are keys. Offsets of scales and tails are
    in elements of their pointers. REGISTERS: of `unpacked_once`, "" where the compiler is left
    alone with packed rows.
    """
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
    if ROPE > 0:
        rotary = heads[:, None] & (offs_r < ROPE)[None, :]
        q_rope = tl.load(q_ptrs + RANK + offs_r[None, :], mask=rotary, other=0.0)
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    accs = ()
    for _ in tl.static_range(CHUNKS):
        accs = accs + (tl.zeros((BLOCK_H, CHUNK), dtype=tl.float32),)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for key in range(first, end, BLOCK_N):
        positions = key + tl.arange(0, BLOCK_N)
        visible = positions < end
        if TOP_K > 0:
            listed = indices_TK_ptr + token * stride_indices + positions
            positions = tl.load(listed, mask=visible, other=-1)
            visible = (positions >= 0) & (positions < seen)
            positions = tl.where(visible, positions, 0)
        page, row = pages_of(table, positions, visible, PAGE), positions % PAGE
        scores = tl.zeros((BLOCK_H, BLOCK_N), dtype=tl.float32)
        if ROPE > 0:
            at = page * stride_tail_page + row * stride_tail_row + tail_start
            tails = tails_ptr + at[:, None] + offs_r[None, :]
            in_tail = visible[:, None] & (offs_r < ROPE)[None, :]
            scores = tl.dot(q_rope, tl.trans(tl.load(tails, mask=in_tail, other=0.0)), scores)
        tiles = ()
        for chunk in tl.static_range(CHUNKS):
            offs = chunk * CHUNK + offs_c
            tile = _latent_chunk(
                rows_ptr, scales_ptr, page, row, offs, visible, stride_page, stride_row,
                stride_scale_page, stride_scale_row, scale_start, chunk * CHUNK,
                RANK, CHUNK, BLOCK_N, IS_PACKED,
            )  # fmt: skip
            if IS_PACKED and REGISTERS != "":
                tile = unpacked_once(tile, REGISTERS)
            q_chunk = held_or_loaded(q[chunk], q_ptrs, heads, offs, RANK, RELOADS_Q)
            scores = tl.dot(q_chunk, tl.trans(tile), scores)
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
