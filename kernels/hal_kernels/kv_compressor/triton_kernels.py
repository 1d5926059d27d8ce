"""Gated pooling of windows of tokens into entries, and the state of open windows, in Triton.

Suffixes of tensor names: T tokens, W columns of kv and gate, N entries, D values of an entry, B
sequences, J places in a window, S rows of states (slot, place, then kv and biased gate). Everything
is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence_of(entry, starts_B_ptr, num_sequences, num_steps):
    """The sequence whose entries, of which starts_B_ptr[b] is the first, contain this one."""
    low, high = 0, num_sequences
    for _ in range(num_steps):
        middle = (low + high) // 2
        is_before = tl.load(starts_B_ptr + middle) <= entry
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low


@triton.jit
def _pool(
    acc, peak, total, kv_TW_ptr, gate_TW_ptr, state_ptr, bias_JW_ptr, window, context, column,
    offs_d, stride_kv, stride_gate,
    DIM: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr, STATE_ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums after the tokens of a window, of DIM columns from `column` on: an online softmax per
    channel (https://arxiv.org/abs/1805.02867). Tokens before the step are in the state."""
    for first in range(0, RATIO, BLOCK_J):
        place = first + tl.arange(0, BLOCK_J)
        position = window * RATIO + place
        inside = (place < RATIO)[:, None] & (offs_d < DIM)[None, :]
        is_new = inside & (position >= context)[:, None]
        row = (position - context).to(tl.int64)[:, None]
        columns = column + offs_d[None, :]
        values = tl.load(kv_TW_ptr + row * stride_kv + columns, mask=is_new, other=0.0)
        gates = tl.load(gate_TW_ptr + row * stride_gate + columns, mask=is_new, other=0.0)
        values, gates = values.to(tl.float32), gates.to(tl.float32)
        if HAS_BIAS:
            bias = bias_JW_ptr + place[:, None] * WIDTH + columns
            gates += tl.load(bias, mask=is_new, other=0.0).to(tl.float32)
        is_old = inside & (position < context)[:, None]
        held = state_ptr + (position % STATE_ROWS)[:, None] * (2 * WIDTH) + columns
        values += tl.load(held, mask=is_old, other=0.0).to(tl.float32)
        gates += tl.load(held + WIDTH, mask=is_old, other=0.0).to(tl.float32)
        gates = tl.where(inside, gates, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(gates, axis=0))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights, decay = tl.exp(gates - base[None, :]), tl.exp(peak - base)
        acc = acc * decay + tl.sum(weights * values, axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _kv_compressor_kernel(
    kv_TW_ptr, gate_TW_ptr, state_ptr, bias_JW_ptr, norm_D_ptr, out_ND_ptr,
    starts_B_ptr, lengths_B_ptr, slots_B_ptr, entry_starts_B_ptr,
    num_sequences, num_steps, eps, stride_kv, stride_gate, stride_slot,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, RATIO: tl.constexpr, BLOCK_J: tl.constexpr,
    IS_OVERLAPPING: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (entry). Overlapping: the first columns of the window before, the last of its own.

    There may be more programs than entries, as many as a step could have: they write zeros.
    """
    entry = tl.program_id(0)
    offs_d = tl.arange(0, BLOCK_D)
    out_ptrs = out_ND_ptr + entry.to(tl.int64) * DIM + offs_d
    if entry >= tl.load(entry_starts_B_ptr + num_sequences):
        none = tl.zeros((BLOCK_D,), dtype=tl.float32)
        tl.store(out_ptrs, none.to(out_ND_ptr.dtype.element_ty), mask=offs_d < DIM)
        return
    sequence = _sequence_of(entry, entry_starts_B_ptr, num_sequences, num_steps)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    context = tl.load(lengths_B_ptr + sequence) - queries
    window = context // RATIO + entry - tl.load(entry_starts_B_ptr + sequence)
    slot = tl.load(slots_B_ptr + sequence).to(tl.int64)
    state = state_ptr + slot * stride_slot
    kv = kv_TW_ptr + start.to(tl.int64) * stride_kv
    gate = gate_TW_ptr + start.to(tl.int64) * stride_gate
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    peak = tl.full((BLOCK_D,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    if IS_OVERLAPPING:
        if window > 0:
            acc, peak, total = _pool(
                acc, peak, total, kv, gate, state, bias_JW_ptr, window - 1, context, 0,
                offs_d, stride_kv, stride_gate,
                DIM, 2 * DIM, RATIO, 2 * RATIO, BLOCK_J, HAS_BIAS,
            )  # fmt: skip
        acc, peak, total = _pool(
            acc, peak, total, kv, gate, state, bias_JW_ptr, window, context, DIM,
            offs_d, stride_kv, stride_gate,
            DIM, 2 * DIM, RATIO, 2 * RATIO, BLOCK_J, HAS_BIAS,
        )  # fmt: skip
    else:
        acc, peak, total = _pool(
            acc, peak, total, kv, gate, state, bias_JW_ptr, window, context, 0,
            offs_d, stride_kv, stride_gate, DIM, DIM, RATIO, RATIO, BLOCK_J, HAS_BIAS,
        )  # fmt: skip
    pooled = acc / total
    if HAS_NORM:
        inside = offs_d < DIM
        square = tl.where(inside, pooled * pooled, 0.0)
        weight = tl.load(norm_D_ptr + offs_d, mask=inside, other=0.0).to(tl.float32)
        pooled = pooled / tl.sqrt(tl.sum(square, axis=0) / DIM + eps) * weight
    tl.store(out_ptrs, pooled.to(out_ND_ptr.dtype.element_ty), mask=offs_d < DIM)


@triton.jit
def _compressor_state_kernel(
    kv_TW_ptr, gate_TW_ptr, state_ptr, bias_JW_ptr, starts_B_ptr, lengths_B_ptr, slots_B_ptr,
    stride_kv, stride_gate, stride_slot,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, RATIO: tl.constexpr, STATE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (tokens from the newest back, sequence): what later windows will read."""
    back, sequence = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    if back >= queries:
        return
    position = tl.load(lengths_B_ptr + sequence) - 1 - back
    row = (start + queries - 1 - back).to(tl.int64)
    offs = tl.arange(0, BLOCK_W)
    inside = offs < WIDTH
    values = tl.load(kv_TW_ptr + row * stride_kv + offs, mask=inside, other=0.0)
    gates = tl.load(gate_TW_ptr + row * stride_gate + offs, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = bias_JW_ptr + position % RATIO * WIDTH + offs
        gates += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_B_ptr + sequence).to(tl.int64)
    held = state_ptr + slot * stride_slot + position % STATE_ROWS * (2 * WIDTH) + offs
    tl.store(held, values.to(tl.float32).to(state_ptr.dtype.element_ty), mask=inside)
    tl.store(held + WIDTH, gates.to(state_ptr.dtype.element_ty), mask=inside)
