"""Attention over a window and compressed entries with per-head sinks in Triton.

Suffixes of tensor names: T query rows, D heads side by side, H heads, B sequences, W columns of a
block table, K entries of a list, S splits, L values of a row. A row is key and value of all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_e4m3, decode_ue8m0, pages_of
from hal_kernels.mla_attention.shared_rows import (
    held_or_loaded,
    softmax_step,
    store_heads,
    with_sink,
)

# Of v4_584: e4m3 values, of which 64 share a ue8m0 scale, and the bfloat16 tail behind them.
_QUANTIZED = tl.constexpr(448)
_GROUP = tl.constexpr(64)
_DATA_BYTES = tl.constexpr(576)
_SCALE_BYTES = tl.constexpr(8)


@triton.jit
def _row_tile(
    rows_ptr, tails_ptr, page, row, visible, stride_page, stride_row,
    DIM: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    IS_PACKED: tl.constexpr,
):  # fmt: skip
    """Rows [BLOCK_N, BLOCK_L], in bfloat16 where they are packed (v4_584)."""
    offs_l = tl.arange(0, BLOCK_L)
    base = page * stride_page + row * stride_row
    if IS_PACKED:
        is_value = offs_l < _QUANTIZED
        ptrs = rows_ptr + base[:, None] + offs_l[None, :]
        bits = tl.load(ptrs, mask=visible[:, None] & is_value[None, :], other=0)
        at = page * stride_page + PAGE * _DATA_BYTES + row * _SCALE_BYTES
        groups = rows_ptr + at[:, None] + tl.arange(0, BLOCK_L // _GROUP)[None, :]
        scales = decode_ue8m0(tl.load(groups, mask=visible[:, None], other=127))
        wide = decode_e4m3(bits).reshape(BLOCK_N, BLOCK_L // _GROUP, _GROUP) * scales[:, :, None]
        values = wide.to(tl.bfloat16).reshape(BLOCK_N, BLOCK_L)
        in_tail = visible[:, None] & (offs_l >= _QUANTIZED)[None, :]
        # The tail begins at byte 448; the address of column 448 is that of its first value.
        tail_ptrs = tails_ptr + (base // 2)[:, None] + (offs_l - _QUANTIZED // 2)[None, :]
        rows = tl.where(is_value[None, :], values, tl.load(tail_ptrs, mask=in_tail, other=0.0))
    else:
        held = visible[:, None] & (offs_l < DIM)[None, :]
        rows = tl.load(rows_ptr + base[:, None] + offs_l[None, :], mask=held, other=0.0)
    return rows


@triton.jit
def _attend(q, rows, visible, scale, acc, peak, total):
    """Sums after a tile of rows, which are keys and values."""
    scores = tl.dot(q, tl.trans(rows)) * scale
    weights, decay, peak, total = softmax_step(scores, visible, peak, total)
    return tl.dot(weights.to(rows.dtype), rows, acc * decay[:, None]), peak, total


@triton.jit
def _compressed_attention_kernel(
    q_TD_ptr, window_ptr, window_tails_ptr, main_ptr, main_tails_ptr, indices_TK_ptr, sinks_H_ptr,
    out_ptr, peak_THS_ptr, total_THS_ptr, starts_B_ptr, lengths_B_ptr,
    window_table_BW_ptr, main_table_BW_ptr,
    scale, num_splits, stride_q, stride_indices, stride_window_table, stride_main_table,
    stride_window_page, stride_window_row, stride_main_page, stride_main_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    RATIO: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, PAGE: tl.constexpr, HAS_SINKS: tl.constexpr, IS_WHOLE: tl.constexpr,
    WINDOW_IS_PACKED: tl.constexpr, MAIN_IS_PACKED: tl.constexpr, RELOADS_Q: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence and split of SPLIT entries, block of heads, sequence).

    The first split has the window as well. Splits are of a fixed size, so that a query's result
    does not depend on the rest of the batch. IS_WHOLE: one program sees all keys of a query and
    writes out[T, HEADS * DIM]; otherwise out_ptr is part[T, H, S, L], and the sinks are the
    merge's. TOP_K 0: all complete entries. RATIO 0: no entries.
    """
    query = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    sequence = tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    if query >= queries:
        return
    at = tl.load(lengths_B_ptr + sequence) - queries + query
    token = (start + query).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = head < HEADS
    offs_l = tl.arange(0, BLOCK_L)
    q_ptrs = q_TD_ptr + token * stride_q + head[:, None] * DIM + offs_l[None, :]
    held = heads[:, None] & (offs_l < DIM)[None, :]
    q = tl.load(q_ptrs, mask=held, other=0.0)
    acc = tl.zeros((BLOCK_H, BLOCK_L), dtype=tl.float32)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if split == 0:
        table = window_table_BW_ptr + sequence.to(tl.int64) * stride_window_table
        for key in range(tl.maximum(0, at - WINDOW + 1), at + 1, BLOCK_N):
            positions = key + tl.arange(0, BLOCK_N)
            visible = positions <= at
            page, row = pages_of(table, positions, visible, PAGE), positions % PAGE
            rows = _row_tile(
                window_ptr, window_tails_ptr, page, row, visible, stride_window_page,
                stride_window_row, DIM, BLOCK_L, BLOCK_N, PAGE, WINDOW_IS_PACKED,
            )  # fmt: skip
            q_now = held_or_loaded(q, q_ptrs, held, RELOADS_Q)
            acc, peak, total = _attend(q_now, rows, visible, scale, acc, peak, total)
    if RATIO > 0:
        complete = (at + 1) // RATIO
        first, end = 0, complete
        if TOP_K > 0:
            end = TOP_K
        if not IS_WHOLE:
            first, end = split * SPLIT, tl.minimum(end, (split + 1) * SPLIT)
        table = main_table_BW_ptr + sequence.to(tl.int64) * stride_main_table
        for key in range(first, end, BLOCK_N):
            entries = key + tl.arange(0, BLOCK_N)
            visible = entries < end
            if TOP_K > 0:
                listed = indices_TK_ptr + token * stride_indices + entries
                entries = tl.load(listed, mask=visible, other=-1)
                visible = (entries >= 0) & (entries < complete)
                entries = tl.where(visible, entries, 0)
            page, row = pages_of(table, entries, visible, PAGE), entries % PAGE
            rows = _row_tile(
                main_ptr, main_tails_ptr, page, row, visible, stride_main_page,
                stride_main_row, DIM, BLOCK_L, BLOCK_N, PAGE, MAIN_IS_PACKED,
            )  # fmt: skip
            q_now = held_or_loaded(q, q_ptrs, held, RELOADS_Q)
            acc, peak, total = _attend(q_now, rows, visible, scale, acc, peak, total)
    at_head = token * HEADS + head
    if IS_WHOLE:
        if HAS_SINKS:
            sinks = tl.load(sinks_H_ptr + head, mask=heads, other=0.0).to(tl.float32)
            acc, total = with_sink(acc, peak, total, sinks)
    else:
        at_head = at_head * num_splits + split
    store_heads(
        out_ptr, peak_THS_ptr, total_THS_ptr, acc, peak, total, at_head, heads, offs_l,
        DIM, IS_WHOLE,
    )  # fmt: skip
