"""Triton functions of attention whose heads share one row per key, which is key and value.

Suffixes of tensor names: T query rows, D heads side by side, H heads, S splits, L latent width.
Scores and sums are in float32, in base 2: exp2 is the instruction that the devices have.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def query_chunks(
    q_ptrs, heads, WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The columns of a query's heads in chunks, as tiles [BLOCK_H, CHUNK]."""
    chunks = ()
    for chunk in tl.static_range(CHUNKS):
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        held = heads[:, None] & (offs < WIDTH)[None, :]
        chunks = chunks + (tl.load(q_ptrs + offs[None, :], mask=held, other=0.0),)
    return chunks


@triton.jit
def held_or_loaded(
    q, q_ptrs, heads, offs, WIDTH: tl.constexpr, RELOADS_Q: tl.constexpr
):  # fmt: skip
    """The query's chunk for one step. Every warp multiplies all of it, so where registers are few
    it is better read again (a volatile load stays in its loop) than kept over the loop."""
    if RELOADS_Q:
        held = heads[:, None] & (offs < WIDTH)[None, :]
        q = tl.load(q_ptrs + offs[None, :], mask=held, other=0.0, volatile=True)
    return q


@triton.jit
def softmax_step(scores, visible, peak, total):
    """(weights, decay, peak, total) after a tile of scores [BLOCK_H, BLOCK_N], as the online
    softmax of https://arxiv.org/abs/1805.02867. Rows that see no key stay at a sum of 0."""
    scores = tl.where(visible[None, :], scores * LOG2_E, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing has the maximum -inf, of which no difference can be taken.
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    return weights, decay, new_peak, total * decay + tl.sum(weights, axis=1)


@triton.jit
def weighted_sums(accs, weights, tiles, decay, CHUNKS: tl.constexpr):
    """Sums of values after a step, chunk by chunk of the row's columns."""
    new = ()
    for chunk in tl.static_range(CHUNKS):
        tile = tiles[chunk]
        new = new + (tl.dot(weights.to(tile.dtype), tile, accs[chunk] * decay[:, None]),)
    return new


@triton.jit
def store_heads(
    out_ptr, peak_ptr, total_ptr, accs, peak, total, at, heads,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The result of heads whose keys were all seen here (IS_WHOLE), or the parts of a split.

    at: index of each head in units of WIDTH values.
    """
    if not IS_WHOLE:
        tl.store(peak_ptr + at, peak, mask=heads)
        tl.store(total_ptr + at, total, mask=heads)
    for chunk in tl.static_range(CHUNKS):
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        acc = accs[chunk]
        if IS_WHOLE:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out_ptrs = out_ptr + at[:, None] * WIDTH + offs[None, :]
        held = heads[:, None] & (offs < WIDTH)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def _merge_splits_kernel(
    part_THSL_ptr, peak_THS_ptr, total_THS_ptr, out_TD_ptr, sinks_H_ptr, num_splits, stride_out,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (query row, head): merges the splits in their order, then the sink, which is one more
    logit without a value (https://arxiv.org/abs/2309.17453)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_L)
    base = (row * tl.num_programs(1) + head) * num_splits
    acc = tl.zeros((1, BLOCK_L), dtype=tl.float32)
    peak = tl.full((1,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    for split in range(num_splits):
        theirs = tl.load(peak_THS_ptr + base + split)
        new_peak = tl.maximum(peak, theirs)
        floor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        mine, other = tl.exp2(peak - floor), tl.exp2(theirs - floor)
        part_ptrs = part_THSL_ptr + (base + split) * WIDTH + offs
        part = tl.load(part_ptrs, mask=offs < WIDTH, other=0.0)
        acc = acc * mine[:, None] + part[None, :] * other[:, None]
        total = total * mine + tl.load(total_THS_ptr + base + split) * other
        peak = new_peak
    if HAS_SINKS:
        decay, total = with_sink(peak, total, tl.load(sinks_H_ptr + head).to(tl.float32))
        acc *= decay[:, None]
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_ptrs = out_TD_ptr + row * stride_out + head * WIDTH + offs[None, :]
    tl.store(out_ptrs, out.to(out_TD_ptr.dtype.element_ty), mask=(offs < WIDTH)[None, :])


@triton.jit
def with_sink(peak, total, sink):
    """(decay of the sums of values, sum of weights) with one more logit `sink` without a value."""
    logit = sink * LOG2_E
    new_peak = tl.maximum(peak, logit)
    # A logit of -inf beside a row that has seen nothing leaves nothing to compare.
    floor = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    decay = tl.exp2(peak - floor)
    return decay, total * decay + tl.exp2(logit - floor)
