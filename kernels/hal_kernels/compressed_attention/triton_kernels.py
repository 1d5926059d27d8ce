"""Attention over a window and compressed entries with per-head sinks in Triton.

Suffixes of tensor names: T query rows, D heads side by side, H heads, B sequences, W columns of a
block table, K entries of a list, S splits, L values of a row. A row is key and value of all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_e4m3, decode_ue8m0, pages_of
from hal_kernels.kv_write.unpacking import unpacked_once
from hal_kernels.mla_attention.shared_rows import (
    held_or_loaded,
    query_chunks,
    softmax_step,
    store_heads,
    weighted_sums,
    with_sink,
)

# Of v4_584: e4m3 values, of which 64 share a ue8m0 scale, and the bfloat16 tail behind them.
_QUANTIZED = tl.constexpr(448)
_GROUP = tl.constexpr(64)
_DATA_BYTES = tl.constexpr(576)
_SCALE_BYTES = tl.constexpr(8)


@triton.jit
def _row_chunk(
    rows_ptr, tails_ptr, page, row, offs, visible, stride_page, stride_row, FIRST: tl.constexpr,
    DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    IS_PACKED: tl.constexpr,
):  # fmt: skip
    """The columns offs, from FIRST on, of these rows [BLOCK_N, CHUNK], in bfloat16 where they are
    packed (v4_584)."""
    base = page * stride_page + row * stride_row
    if IS_PACKED:
        is_value = offs < _QUANTIZED
        ptrs = rows_ptr + base[:, None] + offs[None, :]
        bits = tl.load(ptrs, mask=visible[:, None] & is_value[None, :], other=0)
        at = page * stride_page + PAGE * _DATA_BYTES + row * _SCALE_BYTES + FIRST // _GROUP
        groups = rows_ptr + at[:, None] + tl.arange(0, CHUNK // _GROUP)[None, :]
        scales = decode_ue8m0(tl.load(groups, mask=visible[:, None], other=127))
        wide = decode_e4m3(bits).reshape(BLOCK_N, CHUNK // _GROUP, _GROUP) * scales[:, :, None]
        rows = wide.to(tl.bfloat16).reshape(BLOCK_N, CHUNK)
        if FIRST + CHUNK > _QUANTIZED:
            # The tail begins at byte 448, which is the address of column 448 less 224 values.
            in_tail = visible[:, None] & (offs >= _QUANTIZED)[None, :]
            tails = tails_ptr + (base // 2)[:, None] + (offs - _QUANTIZED // 2)[None, :]
            rows = tl.where(is_value[None, :], rows, tl.load(tails, mask=in_tail, other=0.0))
    else:
        held = visible[:, None] & (offs < DIM)[None, :]
        rows = tl.load(rows_ptr + base[:, None] + offs[None, :], mask=held, other=0.0)
    return rows


@triton.jit
def _attend(
    q, q_ptrs, heads, rows_ptr, tails_ptr, page, row, visible, scale, accs, peak, total,
    stride_page, stride_row,
    DIM: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, IS_PACKED: tl.constexpr, RELOADS_Q: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Sums after a tile of rows, which are keys and values."""
    scores = tl.zeros((peak.shape[0], BLOCK_N), dtype=tl.float32)
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        tile = _row_chunk(
            rows_ptr, tails_ptr, page, row, offs, visible, stride_page, stride_row, chunk * CHUNK,
            DIM, CHUNK, BLOCK_N, PAGE, IS_PACKED,
        )  # fmt: skip
        if IS_PACKED and REGISTERS != "":
            tile = unpacked_once(tile, REGISTERS)
        q_chunk = held_or_loaded(q[chunk], q_ptrs, heads, offs, DIM, RELOADS_Q)
        scores = tl.dot(q_chunk, tl.trans(tile), scores)
        tiles = tiles + (tile,)
    weights, decay, peak, total = softmax_step(scores * scale, visible, peak, total)
    return weighted_sums(accs, weights, tiles, decay, CHUNKS), peak, total


@triton.jit
def _compressed_attention_kernel(
    q_TD_ptr, window_ptr, window_tails_ptr, main_ptr, main_tails_ptr, indices_TK_ptr, sinks_H_ptr,
    out_ptr, peak_THS_ptr, total_THS_ptr, starts_B_ptr, lengths_B_ptr,
    window_table_BW_ptr, main_table_BW_ptr,
    scale, num_splits, stride_q, stride_indices, stride_window_table, stride_main_table,
    stride_window_page, stride_window_row, stride_main_page, stride_main_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    RATIO: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr, WINDOW_IS_PACKED: tl.constexpr, MAIN_IS_PACKED: tl.constexpr,
    RELOADS_Q: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence and split of SPLIT entries, block of heads, sequence).

    The first split has the window as well. Splits are of a fixed size, so that a query's result
    does not depend on the rest of the batch. IS_WHOLE: one program sees all keys of a query and
    writes out[T, HEADS * DIM]; otherwise out_ptr is part[T, H, S, L], and the sinks are the
    merge's. TOP_K 0: all complete entries. RATIO 0: no entries.
    REGISTERS: of `unpacked_once`, "" where the compiler is left alone with packed rows.
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
    q_ptrs = q_TD_ptr + token * stride_q + head[:, None] * DIM
    q = query_chunks(q_ptrs, heads, DIM, CHUNK, CHUNKS)
    accs = ()
    for _ in tl.static_range(CHUNKS):
        accs = accs + (tl.zeros((BLOCK_H, CHUNK), dtype=tl.float32),)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if split == 0:
        table = window_table_BW_ptr + sequence.to(tl.int64) * stride_window_table
        for key in range(tl.maximum(0, at - WINDOW + 1), at + 1, BLOCK_N):
            positions = key + tl.arange(0, BLOCK_N)
            visible = positions <= at
            page, row = pages_of(table, positions, visible, PAGE), positions % PAGE
            accs, peak, total = _attend(
                q, q_ptrs, heads, window_ptr, window_tails_ptr, page, row, visible, scale,
                accs, peak, total, stride_window_page, stride_window_row,
                DIM, CHUNK, CHUNKS, BLOCK_N, PAGE, WINDOW_IS_PACKED, RELOADS_Q,
                REGISTERS,
            )  # fmt: skip
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
            accs, peak, total = _attend(
                q, q_ptrs, heads, main_ptr, main_tails_ptr, page, row, visible, scale,
                accs, peak, total, stride_main_page, stride_main_row,
                DIM, CHUNK, CHUNKS, BLOCK_N, PAGE, MAIN_IS_PACKED, RELOADS_Q,
                REGISTERS,
            )  # fmt: skip
    at_head = token * HEADS + head
    if IS_WHOLE:
        if HAS_SINKS:
            sinks = tl.load(sinks_H_ptr + head, mask=heads, other=0.0).to(tl.float32)
            decay, total = with_sink(peak, total, sinks)
            scaled = ()
            for chunk in tl.static_range(CHUNKS):
                scaled = scaled + (accs[chunk] * decay[:, None],)
            accs = scaled
    else:
        at_head = at_head * num_splits + split
    store_heads(
        out_ptr, peak_THS_ptr, total_THS_ptr, accs, peak, total, at_head, heads,
        DIM, CHUNK, CHUNKS, IS_WHOLE,
    )  # fmt: skip
