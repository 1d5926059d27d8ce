"""Attention over a window in eight bits and compressed entries in eight or four, in Triton.

As `triton_kernels`, for the rows of DeepSeek-V4.1 (v41_528, fp4_288), which have no part in 16
bits. Values times scales are exact in bfloat16 where the scale is a power of two or of four bits.
Suffixes of tensor names: as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_rows import decode_e2m1, decode_e4m3, decode_ue8m0, pages_of
from hal_kernels.kv_write.unpacking import exact_bf16, unpacked_once
from hal_kernels.mla_attention.shared_rows import (
    held_or_loaded,
    query_chunks,
    softmax_step,
    store_heads,
    weighted_sums,
    with_sink,
)

# Bytes of the values of a row, and values that share a scale; the scales of a page are behind it.
_FP8_BYTES, _FP8_GROUP = tl.constexpr(512), tl.constexpr(32)
_FP4_BYTES, _FP4_GROUP = tl.constexpr(256), tl.constexpr(16)


@triton.jit
def _fp8_chunk(
    rows_ptr, page, row, visible, stride_page, FIRST: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """CHUNK columns, from FIRST on, of rows of v41_528: [BLOCK_N, CHUNK] in bfloat16."""
    GROUPS: tl.constexpr = CHUNK // _FP8_GROUP
    base = page * stride_page
    ptrs = rows_ptr + (base + row * _FP8_BYTES + FIRST)[:, None] + tl.arange(0, CHUNK)[None, :]
    bits = tl.load(ptrs, mask=visible[:, None], other=0)
    at = base + PAGE * _FP8_BYTES + row * (_FP8_BYTES // _FP8_GROUP) + FIRST // _FP8_GROUP
    groups = rows_ptr + at[:, None] + tl.arange(0, GROUPS)[None, :]
    scales = decode_ue8m0(tl.load(groups, mask=visible[:, None], other=127))
    wide = decode_e4m3(bits).reshape(BLOCK_N, GROUPS, _FP8_GROUP) * scales[:, :, None]
    return exact_bf16(wide).reshape(BLOCK_N, CHUNK)


@triton.jit
def _fp4_chunk(
    rows_ptr, page, row, visible, stride_page, FIRST: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """CHUNK columns, from FIRST on, of rows of fp4_288: [BLOCK_N, CHUNK] in bfloat16."""
    GROUPS: tl.constexpr = CHUNK // _FP4_GROUP
    base = page * stride_page
    offs = FIRST // 2 + tl.arange(0, CHUNK // 2)
    ptrs = rows_ptr + (base + row * _FP4_BYTES)[:, None] + offs[None, :]
    packed = tl.load(ptrs, mask=visible[:, None], other=0).to(tl.int16)
    codes = tl.join(packed & 0xF, packed >> 4).reshape(BLOCK_N, GROUPS, _FP4_GROUP)
    at = base + PAGE * _FP4_BYTES + row * (2 * _FP4_BYTES // _FP4_GROUP) + FIRST // _FP4_GROUP
    groups = rows_ptr + at[:, None] + tl.arange(0, GROUPS)[None, :]
    bits = tl.load(groups, mask=visible[:, None], other=0)
    scales = tl.where((bits & 0x7F) == 0x7F, float("nan"), decode_e4m3(bits))
    return exact_bf16(decode_e2m1(codes) * scales[:, :, None]).reshape(BLOCK_N, CHUNK)


@triton.jit
def _attend_v41(
    q, q_ptrs, heads, rows_ptr, table, entries, visible, scale, accs, peak, total, stride_page,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    IS_FP4: tl.constexpr, RELOADS_Q: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    """Sums after a tile of rows, which are keys and values."""
    page, row = pages_of(table, entries, visible, PAGE), entries % PAGE
    scores = tl.zeros((peak.shape[0], BLOCK_N), dtype=tl.float32)
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        if IS_FP4:
            tile = _fp4_chunk(
                rows_ptr, page, row, visible, stride_page, chunk * CHUNK, CHUNK, BLOCK_N, PAGE
            )
        else:
            tile = _fp8_chunk(
                rows_ptr, page, row, visible, stride_page, chunk * CHUNK, CHUNK, BLOCK_N, PAGE
            )
        tile = unpacked_once(tile, REGISTERS)
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        q_chunk = held_or_loaded(q[chunk], q_ptrs, heads, offs, CHUNK * CHUNKS, RELOADS_Q)
        scores = tl.dot(q_chunk, tl.trans(tile), scores)
        tiles = tiles + (tile,)
    weights, decay, peak, total = softmax_step(scores * scale, visible, peak, total)
    return weighted_sums(accs, weights, tiles, decay, CHUNKS), peak, total


@triton.jit
def _compressed_attention_v41_kernel(
    q_TD_ptr, window_ptr, main_ptr, indices_TK_ptr, sinks_H_ptr,
    out_ptr, peak_THS_ptr, total_THS_ptr, starts_B_ptr, lengths_B_ptr,
    window_table_BW_ptr, main_table_BW_ptr,
    scale, num_splits, stride_q, stride_indices, stride_window_table, stride_main_table,
    stride_window_page, stride_main_page,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr,
    RATIO: tl.constexpr, BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, HAS_SINKS: tl.constexpr,
    IS_WHOLE: tl.constexpr, MAIN_IS_FP4: tl.constexpr, RELOADS_Q: tl.constexpr,
    REGISTERS: tl.constexpr,
):  # fmt: skip
    """Program (query of a sequence and split of SPLIT entries, block of heads, sequence); splits,
    IS_WHOLE, TOP_K and RATIO as of `_compressed_attention_kernel`. DIM is CHUNK * CHUNKS."""
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
            accs, peak, total = _attend_v41(
                q, q_ptrs, heads, window_ptr, table, positions, positions <= at, scale,
                accs, peak, total, stride_window_page,
                CHUNK, CHUNKS, BLOCK_N, PAGE, False, RELOADS_Q, REGISTERS,
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
            accs, peak, total = _attend_v41(
                q, q_ptrs, heads, main_ptr, table, entries, visible, scale,
                accs, peak, total, stride_main_page,
                CHUNK, CHUNKS, BLOCK_N, PAGE, MAIN_IS_FP4, RELOADS_Q, REGISTERS,
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
