"""Native sparse attention in Triton: entries, choice of blocks, selected and sliding branch.

Suffixes of tensor names: T query rows, D heads side by side, H heads, N blocks of a cache, P
positions in a block, K cached heads, B sequences, W columns of a block table, S splits, C the best
blocks of a split, L blocks of a list. The gates' columns are head and branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.block_sparse_attention.grouped_rows import (
    attend,
    attend_steps,
    load_rows,
    no_sums,
    normalised,
    rows_of_tile,
)
from hal_kernels.nsa_attention.selection import (
    block_importance,
    blocks_of,
    keys_of,
    with_larger,
)


@triton.jit
def _gate(gates_TH_ptr, token, head, stride, held, BRANCH: tl.constexpr):
    logits = tl.load(gates_TH_ptr + token * stride + head * 3 + BRANCH, mask=held, other=0.0)
    return tl.sigmoid(logits.to(tl.float32))


@triton.jit
def _store_rows(
    out_ptr, peak_ptr, total_ptr, gates_TH_ptr, acc, peak, total, token, head, rows, split,
    num_parts, stride_out, stride_gates,
    HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BRANCH: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """A branch under its gate into out[T, D], added to the branches before; or, of a split, its
    sums into parts [T, H, S]."""
    offs = tl.arange(0, BLOCK_DV)
    held = rows[:, None] & (offs < V_HEAD_DIM)[None, :]
    at = token * HEADS + head
    if IS_WHOLE:
        out_ptrs = (
            out_ptr + token[:, None] * stride_out + head[:, None] * V_HEAD_DIM + offs[None, :]
        )
        result = normalised(acc, total)
        result *= _gate(gates_TH_ptr, token, head, stride_gates, rows, BRANCH)[:, None]
        if BRANCH > 0:
            result += tl.load(out_ptrs, mask=held, other=0.0).to(tl.float32)
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=held)
    else:
        at = at * num_parts + split
        tl.store(out_ptr + at[:, None] * V_HEAD_DIM + offs[None, :], acc, mask=held)
    if BRANCH == 0 or not IS_WHOLE:
        tl.store(peak_ptr + at, peak, mask=rows)
        tl.store(total_ptr + at, total, mask=rows)


@triton.jit
def _complete(tokens, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Entries whose keys are all among the first tokens."""
    return tl.maximum(tokens - LENGTH + STRIDE, 0) // STRIDE


@triton.jit
def _nsa_entries_kernel(
    q_TD_ptr, gates_TH_ptr, k_NPKD_ptr, v_NPKD_ptr, out_ptr, peak_THS_ptr, total_THS_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, num_splits, num_parts, stride_q, stride_out, stride_gates, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_Q queries and split of SPLIT entries, cached head, sequence): the
    compressed branch, and the maximum and sum of the scores, by which the choice is made.

    Splits are of a fixed size: the result of a sequence does not depend on the rest of the batch.
    """
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    if tile * BLOCK_Q >= queries:
        return
    context = tl.load(lengths_B_ptr + sequence) - queries
    query, head, rows = rows_of_tile(tile * BLOCK_Q, queries, kv_head, GROUP, BLOCK_Q, BLOCK_G)
    token = (start + query).to(tl.int64)
    q = load_rows(q_TD_ptr, token, head, rows, stride_q, HEAD_DIM, BLOCK_D)
    count = _complete(context + query + 1, LENGTH, STRIDE)
    first, end = 0, _complete(context + tl.minimum((tile + 1) * BLOCK_Q, queries), LENGTH, STRIDE)
    if not IS_WHOLE:
        first, end = split * SPLIT, tl.minimum(end, (split + 1) * SPLIT)
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    k_head = k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head = v_NPKD_ptr + kv_head.to(tl.int64) * stride_v_head
    acc, peak, total = no_sums(BLOCK_Q * BLOCK_G, BLOCK_DV)
    for entry in range(first, end, BLOCK_N):
        entries = entry + tl.arange(0, BLOCK_N)
        inside = entries < end
        visible = rows[:, None] & inside[None, :] & (entries[None, :] < count[:, None])
        acc, peak, total = attend(
            q, acc, peak, total, k_head, v_head, table, entries, inside, visible, scale,
            stride_k_page, stride_k_row, stride_v_page, stride_v_row,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, PAGE,
        )  # fmt: skip
    _store_rows(
        out_ptr, peak_THS_ptr, total_THS_ptr, gates_TH_ptr, acc, peak, total, token, head, rows,
        split, num_parts, stride_out, stride_gates, HEADS, V_HEAD_DIM, BLOCK_DV, 0, IS_WHOLE,
    )  # fmt: skip


@triton.jit
def _sums_of_parts(peak_THS_ptr, total_THS_ptr, at, rows, num_splits, num_parts):
    """Maximum of the scores and inverse of their sum over the splits, 0 where nothing was seen."""
    peak = tl.full(at.shape, -float("inf"), dtype=tl.float32)
    total = tl.zeros(at.shape, dtype=tl.float32)
    for split in range(num_splits):
        theirs = tl.load(peak_THS_ptr + at * num_parts + split, mask=rows, other=-float("inf"))
        sums = tl.load(total_THS_ptr + at * num_parts + split, mask=rows, other=0.0)
        new_peak = tl.maximum(peak, theirs)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - base) + sums * tl.exp2(theirs - base)
        peak = new_peak
    share = tl.where(total > 0.0, 1.0, 0.0) / tl.where(total > 0.0, total, 1.0)
    return tl.where(peak == -float("inf"), 0.0, peak), share


@triton.jit
def _nsa_select_kernel(
    q_TD_ptr, k_NPKD_ptr, peak_THS_ptr, total_THS_ptr, best_TKSC_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, split_blocks, num_splits, num_entry_splits, num_parts, num_kv_heads, stride_q,
    stride_table, stride_k_page, stride_k_row, stride_k_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr, HALO: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    SELECT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_Q queries and split of `split_blocks` blocks, cached head, sequence):
    keys of the BLOCK_C best blocks of each query. Of the importances no more than a tile exists.
    """
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    if tile * BLOCK_Q >= queries:
        return
    context = tl.load(lengths_B_ptr + sequence) - queries
    query, head, rows = rows_of_tile(tile * BLOCK_Q, queries, kv_head, GROUP, BLOCK_Q, BLOCK_G)
    token = (start + query).to(tl.int64)
    q = load_rows(q_TD_ptr, token, head, rows, stride_q, HEAD_DIM, BLOCK_D)
    count = _complete(context + query + 1, LENGTH, STRIDE)
    past = context + tl.minimum((tile + 1) * BLOCK_Q, queries)
    end = _complete(past, LENGTH, STRIDE)
    base, share = _sums_of_parts(
        peak_THS_ptr, total_THS_ptr, token * HEADS + head, rows, num_entry_splits, num_parts
    )
    of_tile = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    own = (context + of_tile) // SELECT
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    k_head = k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head
    best = tl.full((BLOCK_Q, BLOCK_C), -1, dtype=tl.int64)
    low = split * split_blocks
    for first in range(low, tl.minimum(low + split_blocks, tl.cdiv(past, SELECT)), BLOCK_S):
        scores = block_importance(
            q, k_head, table, first, end, count, base, share, scale, stride_k_page, stride_k_row,
            HEAD_DIM, BLOCK_D, PAGE, BLOCK_Q, BLOCK_G, BLOCK_S, SELECT // STRIDE,
            LENGTH // STRIDE, HALO,
        )  # fmt: skip
        blocks = first + tl.arange(0, BLOCK_S)[None, :]
        is_forced = (blocks < INITIAL) | (blocks > own[:, None] - LOCAL)
        keys = keys_of(tl.where(is_forced, float("inf"), scores), blocks)
        keys = tl.where((blocks <= own[:, None]) & (blocks < low + split_blocks), keys, -1)
        best = with_larger(best, keys)
    number = (start + of_tile).to(tl.int64) * num_kv_heads + kv_head
    offs = tl.arange(0, BLOCK_C)
    best_ptrs = best_TKSC_ptr + (number * num_splits + split)[:, None] * BLOCK_C + offs[None, :]
    tl.store(best_ptrs, best, mask=(of_tile < queries)[:, None] & (offs >= 0)[None, :])


@triton.jit
def _nsa_lists_kernel(
    best_TKSC_ptr, lists_TKL_ptr, count, num_splits, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_T of the `count` query rows and cached heads): their lists from the best
    blocks of their splits, -1 behind the blocks."""
    number = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    rows, offs = number < count, tl.arange(0, BLOCK_C)[None, :]
    best_ptrs = best_TKSC_ptr + number * num_splits * BLOCK_C + offs
    best = tl.load(best_ptrs, mask=rows, other=-1)
    for split in range(1, num_splits):
        best = with_larger(best, tl.load(best_ptrs + split * BLOCK_C, mask=rows, other=-1))
    inside = rows & (offs < PLACES)
    tl.store(lists_TKL_ptr + number * PLACES + offs, blocks_of(best), mask=inside)


@triton.jit
def _nsa_branch_kernel(
    q_TD_ptr, gates_TH_ptr, k_NPKD_ptr, v_NPKD_ptr, lists_TKL_ptr, out_ptr, peak_THS_ptr,
    total_THS_ptr, starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, window, num_splits, first_part, num_parts, num_kv_heads, stride_q, stride_out,
    stride_gates, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    SELECT: tl.constexpr, PLACES: tl.constexpr, BRANCH: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_Q queries and split of SPLIT keys, cached head, sequence): BRANCH 1
    is the selected blocks of one query, PLACES in a list; 2 is the window."""
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    first = tile * BLOCK_Q
    if first >= queries:
        return
    context = tl.load(lengths_B_ptr + sequence) - queries
    query, head, rows = rows_of_tile(first, queries, kv_head, GROUP, BLOCK_Q, BLOCK_G)
    token = (start + query).to(tl.int64)
    q = load_rows(q_TD_ptr, token, head, rows, stride_q, HEAD_DIM, BLOCK_D)
    last = context + tl.minimum(first + BLOCK_Q, queries) - 1
    number = (start + first).to(tl.int64) * num_kv_heads + kv_head
    nearest = tl.maximum(0, context + first - window + 1)
    if BRANCH == 1:
        listed = tl.minimum(PLACES, last // SELECT + 1) * SELECT // BLOCK_N
        low, high = 0, listed
    else:
        listed = 0
        low, high = 0, tl.cdiv(last + 1 - nearest, BLOCK_N)
    if not IS_WHOLE:
        low = split * (SPLIT // BLOCK_N)
        high = tl.minimum(high, low + SPLIT // BLOCK_N)
    acc, peak, total = attend_steps(
        q, k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_NPKD_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_BW_ptr + sequence.to(tl.int64) * stride_table,
        lists_TKL_ptr + number * PLACES, context + query, rows, last, nearest, listed, low, high,
        window, scale, stride_k_page, stride_k_row, stride_v_page, stride_v_row,
        SELECT, BLOCK_N, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, PAGE,
    )  # fmt: skip
    _store_rows(
        out_ptr, peak_THS_ptr, total_THS_ptr, gates_TH_ptr, acc, peak, total, token, head, rows,
        first_part + split, num_parts, stride_out, stride_gates,
        HEADS, V_HEAD_DIM, BLOCK_DV, BRANCH, IS_WHOLE,
    )  # fmt: skip


@triton.jit
def _merged(
    part_THSD_ptr, peak_THS_ptr, total_THS_ptr, first, rows, count, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The mean of the values [heads, BLOCK_DV] over `count` parts from `first` on, a number for
    each head, in their order."""
    offs = tl.arange(0, BLOCK_DV)
    held = rows[:, None] & (offs < V_HEAD_DIM)[None, :]
    acc, peak, total = no_sums(first.shape[0], BLOCK_DV)
    for step in range(count):
        part = first + step
        theirs = tl.load(peak_THS_ptr + part, mask=rows, other=-float("inf"))
        new_peak = tl.maximum(peak, theirs)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        mine, other = tl.exp2(peak - base), tl.exp2(theirs - base)
        sums = tl.load(part_THSD_ptr + part[:, None] * V_HEAD_DIM + offs[None, :], held, 0.0)
        acc = acc * mine[:, None] + sums * other[:, None]
        total = total * mine + tl.load(total_THS_ptr + part, mask=rows, other=0.0) * other
        peak = new_peak
    return normalised(acc, total)


@triton.jit
def _nsa_merge_kernel(
    part_THSD_ptr, peak_THS_ptr, total_THS_ptr, gates_TH_ptr, out_TD_ptr,
    entry_parts, selected_parts, window_parts, heads, stride_out, stride_gates,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (query row, BLOCK_H heads): the splits of each branch, and the branches under their
    gates."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = head < heads
    first = (row * heads + head) * (entry_parts + selected_parts + window_parts)
    compressed = _merged(
        part_THSD_ptr, peak_THS_ptr, total_THS_ptr, first, rows, entry_parts, V_HEAD_DIM, BLOCK_DV
    )
    first += entry_parts
    selected = _merged(
        part_THSD_ptr, peak_THS_ptr, total_THS_ptr, first, rows, selected_parts,
        V_HEAD_DIM, BLOCK_DV,
    )  # fmt: skip
    first += selected_parts
    near = _merged(
        part_THSD_ptr, peak_THS_ptr, total_THS_ptr, first, rows, window_parts, V_HEAD_DIM, BLOCK_DV
    )
    out = compressed * _gate(gates_TH_ptr, row, head, stride_gates, rows, 0)[:, None]
    out += selected * _gate(gates_TH_ptr, row, head, stride_gates, rows, 1)[:, None]
    out += near * _gate(gates_TH_ptr, row, head, stride_gates, rows, 2)[:, None]
    offs = tl.arange(0, BLOCK_DV)
    out_ptrs = out_TD_ptr + row * stride_out + head[:, None] * V_HEAD_DIM + offs[None, :]
    held = rows[:, None] & (offs < V_HEAD_DIM)[None, :]
    tl.store(out_ptrs, out.to(out_TD_ptr.dtype.element_ty), mask=held)
