"""Attention over a paged KV cache in Triton: prefill by query tiles, decode by splits of the keys.

Suffixes of tensor names: T query rows, H heads, D head size, B sequences, N blocks of the cache, P
positions in a block, K cached heads, W columns of the block table, S splits. Scores and sums are in
float32, in base 2: exp2 is the instruction that the devices have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.attention.cached_values import of_cached

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """c * tanh(s / c), by exp, which does not overflow for the negative argument."""
    if SOFTCAP == 0.0:
        return scores
    decay = tl.exp(-2.0 * tl.abs(scores) / SOFTCAP)
    tanh = (1.0 - decay) / (1.0 + decay)
    return tl.where(scores < 0.0, -SOFTCAP * tanh, SOFTCAP * tanh)


@triton.jit
def _rows_of(table_W_ptr, positions, inside, stride_page, stride_row, PAGE: tl.constexpr):
    """Offsets of the cache rows of these positions of one sequence."""
    page = tl.load(table_W_ptr + positions // PAGE, mask=inside, other=0).to(tl.int64)
    return page * stride_page + (positions % PAGE) * stride_row


@triton.jit
def _attend(
    q, acc, peak, total, k_ptrs, v_ptrs, visible, scale, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the running maximum, sum and weighted values, after the online softmax of
    https://arxiv.org/abs/1805.02867. Rows that see no key stay at a sum of 0."""
    k, in_k = k_ptrs
    v, in_v = v_ptrs
    keys = of_cached(tl.load(k, mask=in_k, other=0.0), q.dtype)
    scores = _capped(tl.dot(q, tl.trans(keys)) * scale, SOFTCAP) * _LOG2_E
    scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing has the maximum -inf, of which no difference can be taken.
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    values = of_cached(tl.load(v, mask=in_v, other=0.0), q.dtype)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None])
    return acc, new_peak, total


@triton.jit
def _attention_prefill_kernel(
    q_TD_ptr, k_NPKD_ptr, v_NPKD_ptr, out_TD_ptr, sinks_H_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, v_scale, stride_q, stride_out, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, IS_CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (query tile, head, sequence). GROUP query heads share a cached head. v_scale: what
    cached values are multiplied by; the scale of keys is in `scale`."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    length = tl.load(lengths_B_ptr + sequence)
    if tile * BLOCK_M >= queries:
        return
    context = length - queries
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    rows = offs_m < queries
    q_ptrs = q_TD_ptr + (start + offs_m).to(tl.int64)[:, None] * stride_q + head * HEAD_DIM
    q = tl.load(q_ptrs + offs_d[None, :], mask=rows[:, None] & (offs_d < HEAD_DIM), other=0.0)
    at = context + offs_m
    end = length
    first = 0
    if IS_CAUSAL:
        end = tl.minimum(length, context + (tile + 1) * BLOCK_M)
    if WINDOW > 0:
        first = tl.maximum(0, context + tile * BLOCK_M - WINDOW + 1) // BLOCK_N * BLOCK_N
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    k_head = k_NPKD_ptr + (head // GROUP).to(tl.int64) * stride_k_head
    v_head = v_NPKD_ptr + (head // GROUP).to(tl.int64) * stride_v_head
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for key in range(first, end, BLOCK_N):
        offs_n = key + tl.arange(0, BLOCK_N)
        inside = offs_n < length
        visible = inside[None, :]  # also of rows that are not there, of which nothing is stored
        if IS_CAUSAL:
            visible &= offs_n[None, :] <= at[:, None]
        if WINDOW > 0:
            visible &= offs_n[None, :] > at[:, None] - WINDOW
        k_rows = _rows_of(table, offs_n, inside, stride_k_page, stride_k_row, PAGE)
        v_rows = _rows_of(table, offs_n, inside, stride_v_page, stride_v_row, PAGE)
        k = k_head + k_rows[:, None] + offs_d[None, :], inside[:, None] & (offs_d < HEAD_DIM)
        v = v_head + v_rows[:, None] + offs_dv[None, :], inside[:, None] & (offs_dv < V_HEAD_DIM)
        acc, peak, total = _attend(q, acc, peak, total, k, v, visible, scale, SOFTCAP)
    if HAS_SINKS:
        acc, total = _with_sink(acc, peak, total, tl.load(sinks_H_ptr + head).to(tl.float32))
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
    out_ptrs = out_TD_ptr + (start + offs_m).to(tl.int64)[:, None] * stride_out + head * V_HEAD_DIM
    tl.store(
        out_ptrs + offs_dv[None, :],
        out.to(out_TD_ptr.dtype.element_ty),
        mask=rows[:, None] & (offs_dv < V_HEAD_DIM),
    )


@triton.jit
def _with_sink(acc, peak, total, sink):
    """A sink is one more logit without a value (https://arxiv.org/abs/2309.17453)."""
    logit = sink * _LOG2_E
    new_peak = tl.maximum(peak, logit)
    decay = tl.exp2(peak - new_peak)
    return acc * decay[:, None], total * decay + tl.exp2(logit - new_peak)


@triton.jit
def _attention_decode_kernel(
    q_TD_ptr, k_NPKD_ptr, v_NPKD_ptr, part_BHSD_ptr, peak_BHS_ptr, total_BHS_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, num_heads, num_splits, stride_q, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    GROUP: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Program (split of SPLIT keys, cached head, sequence): all query heads of the cached head, so
    that its keys are read once. Splits are of a fixed size: the result of a sequence does not
    depend on the rest of the batch. BLOCK_H >= GROUP is what a matrix instruction needs at least.
    """
    split, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_B_ptr + sequence)
    row = tl.load(starts_B_ptr + sequence)
    offs_h = tl.arange(0, BLOCK_H)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads = offs_h < GROUP
    head = kv_head * GROUP + offs_h
    part = (sequence.to(tl.int64) * num_heads + head) * num_splits + split
    first, end = split * SPLIT, tl.minimum(length, (split + 1) * SPLIT)
    if WINDOW > 0:
        first = tl.maximum(first, (length - WINDOW) // BLOCK_N * BLOCK_N)
    acc = tl.zeros((BLOCK_H, BLOCK_DV), dtype=tl.float32)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if first < end:
        q_ptrs = q_TD_ptr + row.to(tl.int64) * stride_q + head[:, None] * HEAD_DIM
        q = tl.load(q_ptrs + offs_d[None, :], mask=heads[:, None] & (offs_d < HEAD_DIM), other=0.0)
        table = table_BW_ptr + sequence.to(tl.int64) * stride_table
        k_head = k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head
        v_head = v_NPKD_ptr + kv_head.to(tl.int64) * stride_v_head
        for key in range(first, end, BLOCK_N):
            offs_n = key + tl.arange(0, BLOCK_N)
            inside = offs_n < end
            # Of heads that are not there nothing is stored, so the same keys are seen by all.
            seen = inside
            if WINDOW > 0:
                seen &= offs_n >= length - WINDOW
            k_rows = _rows_of(table, offs_n, inside, stride_k_page, stride_k_row, PAGE)
            v_rows = _rows_of(table, offs_n, inside, stride_v_page, stride_v_row, PAGE)
            k = k_head + k_rows[:, None] + offs_d[None, :], inside[:, None] & (offs_d < HEAD_DIM)
            v = (
                v_head + v_rows[:, None] + offs_dv[None, :],
                inside[:, None] & (offs_dv < V_HEAD_DIM),
            )
            acc, peak, total = _attend(q, acc, peak, total, k, v, seen[None, :], scale, SOFTCAP)
    tl.store(
        part_BHSD_ptr + part[:, None] * V_HEAD_DIM + offs_dv[None, :],
        acc,
        mask=heads[:, None] & (offs_dv < V_HEAD_DIM),
    )
    tl.store(peak_BHS_ptr + part, peak, mask=heads)
    tl.store(total_BHS_ptr + part, total, mask=heads)


@triton.jit
def _attention_merge_kernel(
    part_BHSD_ptr, peak_BHS_ptr, total_BHS_ptr, out_TD_ptr, sinks_H_ptr, starts_B_ptr,
    num_heads, num_splits, v_scale, stride_out,
    BLOCK_H: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_H heads, sequence): merges the splits in their order, then the sink. v_scale:
    of `_attention_prefill_kernel`."""
    sequence = tl.program_id(1)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads, offs = head < num_heads, tl.arange(0, BLOCK_DV)
    held = heads[:, None] & (offs < V_HEAD_DIM)[None, :]
    base = (sequence.to(tl.int64) * num_heads + head) * num_splits
    acc = tl.zeros((BLOCK_H, BLOCK_DV), dtype=tl.float32)
    peak = tl.full((BLOCK_H,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for split in range(num_splits):
        theirs = tl.load(peak_BHS_ptr + base + split, mask=heads, other=-float("inf"))
        new_peak = tl.maximum(peak, theirs)
        floor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        mine, other = tl.exp2(peak - floor), tl.exp2(theirs - floor)
        part_ptrs = part_BHSD_ptr + (base + split)[:, None] * V_HEAD_DIM + offs[None, :]
        part = tl.load(part_ptrs, mask=held, other=0.0)
        acc = acc * mine[:, None] + part * other[:, None]
        their_total = tl.load(total_BHS_ptr + base + split, mask=heads, other=0.0)
        total = total * mine + their_total * other
        peak = new_peak
    if HAS_SINKS:
        sink = tl.load(sinks_H_ptr + head, mask=heads, other=0.0).to(tl.float32)
        acc, total = _with_sink(acc, peak, total, sink)
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None] * v_scale
    row = tl.load(starts_B_ptr + sequence).to(tl.int64)
    out_ptrs = out_TD_ptr + row * stride_out + head[:, None] * V_HEAD_DIM + offs[None, :]
    tl.store(out_ptrs, out.to(out_TD_ptr.dtype.element_ty), mask=held)
