"""Decode attention times the output projection in Triton, without atomics.

Two ways. One pass: a program attends for the query heads of a cached head and multiplies by that
head's columns of the weight at once; each program of a cached head attends anew, for a piece of the
result of its own. Split keys: `_attention_decode_kernel` attends by splits of the keys, and one
kernel merges the splits, multiplies and adds the residual. Heads are summed in float32, across
programs by parts in memory that `_projection_sum_kernel` adds in the order of the heads: the
result does not depend on which program comes first.

Suffixes of tensor names as in `hal_kernels.attention.triton_kernels`, and Y columns of the result,
G groups of heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.attention.triton_kernels import _attend, _rows_of, _with_sink


@triton.jit
def _attention_project_kernel(
    q_TD_ptr, k_NPKD_ptr, v_NPKD_ptr, w_YD_ptr, part_GTY_ptr, sinks_H_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, tokens, width, tiles_each, stride_q, stride_w, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Y: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (piece of tiles_each * BLOCK_Y columns of y, cached head, sequence)."""
    piece, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts_B_ptr + sequence)
    if row == tl.load(starts_B_ptr + sequence + 1):
        return
    length = tl.load(lengths_B_ptr + sequence)
    offs_h = tl.arange(0, BLOCK_H)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads = offs_h < GROUP
    head = kv_head * GROUP + offs_h
    q_ptrs = q_TD_ptr + row.to(tl.int64) * stride_q + head[:, None] * HEAD_DIM
    q = tl.load(q_ptrs + offs_d[None, :], mask=heads[:, None] & (offs_d < HEAD_DIM), other=0.0)
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    k_head = k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head = v_NPKD_ptr + kv_head.to(tl.int64) * stride_v_head
    acc = tl.zeros((BLOCK_H, BLOCK_DV), dtype=tl.float32)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(0, (length - WINDOW) // BLOCK_N * BLOCK_N)
    for key in range(first, length, BLOCK_N):
        offs_n = key + tl.arange(0, BLOCK_N)
        inside = offs_n < length
        visible = heads[:, None] & inside[None, :]
        if WINDOW > 0:
            visible &= offs_n[None, :] >= length - WINDOW
        k_rows = _rows_of(table, offs_n, inside, stride_k_page, stride_k_row, PAGE)
        v_rows = _rows_of(table, offs_n, inside, stride_v_page, stride_v_row, PAGE)
        k = k_head + k_rows[:, None] + offs_d[None, :], inside[:, None] & (offs_d < HEAD_DIM)
        v = v_head + v_rows[:, None] + offs_dv[None, :], inside[:, None] & (offs_dv < V_HEAD_DIM)
        acc, peak, total = _attend(q, acc, peak, total, k, v, visible, scale, SOFTCAP)
    if HAS_SINKS:
        sink = tl.load(sinks_H_ptr + head, mask=heads, other=0.0).to(tl.float32)
        acc, total = _with_sink(acc, peak, total, sink)
    attended = (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(w_YD_ptr.dtype.element_ty)
    part = part_GTY_ptr + (kv_head * tokens + row).to(tl.int64) * width
    w_head = w_YD_ptr + kv_head * GROUP * V_HEAD_DIM + offs_dv[None, :]
    for tile in range(piece * tiles_each, (piece + 1) * tiles_each):
        offs_y = tile * BLOCK_Y + tl.arange(0, BLOCK_Y)
        inside = offs_y < width
        w_ptrs = w_head + offs_y.to(tl.int64)[:, None] * stride_w
        in_w = inside[:, None] & (offs_dv < V_HEAD_DIM)
        y = tl.zeros((BLOCK_H, BLOCK_Y), dtype=tl.float32)
        for one in range(GROUP):
            w = tl.load(w_ptrs + one * V_HEAD_DIM, mask=in_w, other=0.0)
            # One head's row of the product, the others zero: all heads' rows are summed below.
            mine = tl.where(offs_h[:, None] == one, attended, 0.0)
            y = tl.dot(mine, tl.trans(w), y)
        tl.store(part + offs_y, tl.sum(y, axis=0), mask=inside)


@triton.jit
def _merge_splits(
    part_BHSD_ptr, peak_BHS_ptr, total_BHS_ptr, at, inside, num_splits,
    ROWS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, IS_ONE: tl.constexpr,
):  # fmt: skip
    """(weighted values, maximum, sum) of one head of ROWS sequences, splits in their order. at: the
    first split of each. IS_ONE: there is one split only."""
    offs = tl.arange(0, BLOCK_DV)
    in_part = inside[:, None] & (offs < V_HEAD_DIM)[None, :]
    if IS_ONE:
        acc = tl.load(part_BHSD_ptr + at[:, None] * V_HEAD_DIM + offs[None, :], in_part, other=0.0)
        peak = tl.load(peak_BHS_ptr + at, mask=inside, other=0.0)
        total = tl.load(total_BHS_ptr + at, mask=inside, other=0.0)
    else:
        acc = tl.zeros((ROWS, BLOCK_DV), dtype=tl.float32)
        peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for split in range(num_splits):
            theirs = tl.load(peak_BHS_ptr + at + split, mask=inside, other=-float("inf"))
            new_peak = tl.maximum(peak, theirs)
            floor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            mine, other = tl.exp2(peak - floor), tl.exp2(theirs - floor)
            part_ptrs = part_BHSD_ptr + (at + split)[:, None] * V_HEAD_DIM + offs[None, :]
            part = tl.load(part_ptrs, mask=in_part, other=0.0)
            acc = acc * mine[:, None] + part * other[:, None]
            their_total = tl.load(total_BHS_ptr + at + split, mask=inside, other=0.0)
            total = total * mine + their_total * other
            peak = new_peak
    return acc, peak, total


@triton.jit
def _attention_merge_project_kernel(
    part_BHSD_ptr, peak_BHS_ptr, total_BHS_ptr, w_YD_ptr, y_TY_ptr, part_GTY_ptr, residual_TY_ptr,
    sinks_H_ptr, starts_B_ptr,
    num_sequences, num_heads, num_splits, tokens, width, stride_w, stride_y, stride_residual,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_Y: tl.constexpr,
    GROUPS: tl.constexpr, IS_ONE: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_Y columns of y, group of heads, ROWS sequences): merges the splits of each
    head, then y = attended @ w.T + residual; with GROUPS > 1 its float32 part of that."""
    group = tl.program_id(1)
    sequence = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    offs_y = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    offs_dv = tl.arange(0, BLOCK_DV)
    is_one = sequence < num_sequences
    row = tl.load(starts_B_ptr + sequence, mask=is_one, other=0)
    inside = is_one & (tl.load(starts_B_ptr + sequence + 1, mask=is_one, other=0) > row)
    columns = offs_y < width
    w_ptrs = w_YD_ptr + offs_y.to(tl.int64)[:, None] * stride_w + offs_dv[None, :]
    in_w = columns[:, None] & (offs_dv < V_HEAD_DIM)
    each = tl.cdiv(num_heads, GROUPS)
    y = tl.zeros((ROWS, BLOCK_Y), dtype=tl.float32)
    for head in range(group * each, tl.minimum((group + 1) * each, num_heads)):
        w = tl.load(w_ptrs + head * V_HEAD_DIM, mask=in_w, other=0.0)
        at = (sequence.to(tl.int64) * num_heads + head) * num_splits
        acc, peak, total = _merge_splits(
            part_BHSD_ptr, peak_BHS_ptr, total_BHS_ptr, at, inside, num_splits,
            ROWS, V_HEAD_DIM, BLOCK_DV, IS_ONE,
        )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks_H_ptr + head).to(tl.float32)
            acc, total = _with_sink(acc, peak, total, sink)
        attended = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        y = tl.dot(attended.to(w.dtype), tl.trans(w), y)
    tile = inside[:, None] & columns[None, :]
    if GROUPS > 1:
        part = part_GTY_ptr + (group * tokens + row).to(tl.int64)[:, None] * width
        tl.store(part + offs_y[None, :], y, mask=tile)
    else:
        at_row = row.to(tl.int64)[:, None]
        if HAS_RESIDUAL:
            ptrs = residual_TY_ptr + at_row * stride_residual + offs_y[None, :]
            y += tl.load(ptrs, mask=tile, other=0.0).to(tl.float32)
        y_ptrs = y_TY_ptr + at_row * stride_y + offs_y[None, :]
        tl.store(y_ptrs, y.to(y_TY_ptr.dtype.element_ty), mask=tile)


@triton.jit
def _projection_sum_kernel(
    part_GTY_ptr, y_TY_ptr, residual_TY_ptr, starts_B_ptr,
    groups, tokens, width, stride_y, stride_residual,
    BLOCK_Y: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_Y columns, sequence): sums the parts in the order of the heads, then the
    residual."""
    sequence = tl.program_id(1)
    row = tl.load(starts_B_ptr + sequence)
    if row == tl.load(starts_B_ptr + sequence + 1):
        return
    offs = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    inside = offs < width
    y = tl.zeros((BLOCK_Y,), dtype=tl.float32)
    for group in range(groups):
        part = part_GTY_ptr + (group * tokens + row).to(tl.int64) * width + offs
        y += tl.load(part, mask=inside, other=0.0)
    at_row = row.to(tl.int64)
    if HAS_RESIDUAL:
        ptrs = residual_TY_ptr + at_row * stride_residual + offs
        y += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    y_ptrs = y_TY_ptr + at_row * stride_y + offs
    tl.store(y_ptrs, y.to(y_TY_ptr.dtype.element_ty), mask=inside)
