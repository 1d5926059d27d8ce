"""Triton functions of attention whose tile has the query heads of one cached head, side by side.

A row of a tile is one head of one query. Suffixes of tensor names: T query rows, D heads side by
side, W columns of a block table. Scores and sums are in float32, in base 2: exp2 is the instruction
that the devices have, and `scale` carries the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_FARTHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rows_of_tile(
    first, queries, kv_head, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr
):
    """(query, head, whether there is such a row) of BLOCK_Q queries from `first` on, each with
    BLOCK_G places for the GROUP heads of the cached head."""
    offs = tl.arange(0, BLOCK_Q * BLOCK_G)
    query, member = first + offs // BLOCK_G, offs % BLOCK_G
    return query, kv_head * GROUP + member, (query < queries) & (member < GROUP)


@triton.jit
def load_rows(q_TD_ptr, token, head, rows, stride_q, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The tile [rows, BLOCK_D] of q; token: int64."""
    offs = tl.arange(0, BLOCK_D)
    ptrs = q_TD_ptr + token[:, None] * stride_q + head[:, None] * HEAD_DIM + offs[None, :]
    return tl.load(ptrs, mask=rows[:, None] & (offs < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_keys(
    ptr, table_W_ptr, positions, inside, stride_page, stride_row,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The rows [positions, BLOCK_D] of one cached head; zero where not inside, which may be
    anywhere."""
    page = tl.load(table_W_ptr + positions // PAGE, mask=inside, other=0).to(tl.int64)
    offs = tl.arange(0, BLOCK_D)
    at = page * stride_page + (positions % PAGE) * stride_row
    held = inside[:, None] & (offs < DIM)[None, :]
    return tl.load(ptr + at[:, None] + offs[None, :], mask=held, other=0.0)


@triton.jit
def no_sums(ROWS: tl.constexpr, BLOCK_DV: tl.constexpr):
    """(weighted values, maximum, sum) of rows that have seen no key."""
    acc = tl.zeros((ROWS, BLOCK_DV), dtype=tl.float32)
    peak = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    return acc, peak, tl.zeros((ROWS,), dtype=tl.float32)


@triton.jit
def attend(
    q, acc, peak, total, k_ptr, v_ptr, table_W_ptr, positions, inside, visible, scale,
    stride_k_page, stride_k_row, stride_v_page, stride_v_row,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Sums after a tile of keys, as the online softmax of https://arxiv.org/abs/1805.02867. inside:
    keys that are there at all; visible: [rows, keys], none that is not inside."""
    keys = load_keys(
        k_ptr, table_W_ptr, positions, inside, stride_k_page, stride_k_row, HEAD_DIM, BLOCK_D, PAGE
    )
    scores = tl.where(visible, tl.dot(q, tl.trans(keys)) * scale, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing has the maximum -inf, of which no difference can be taken.
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    values = load_keys(
        v_ptr, table_W_ptr, positions, inside, stride_v_page, stride_v_row,
        V_HEAD_DIM, BLOCK_DV, PAGE,
    )  # fmt: skip
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None])
    return acc, new_peak, total


@triton.jit
def attend_steps(
    q, k_ptr, v_ptr, table_W_ptr, places_ptr, at, rows, last, nearest, listed_steps, low, high,
    window, scale, stride_k_page, stride_k_row, stride_v_page, stride_v_row,
    KEY_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """(weighted values, maximum, sum) after the steps from `low` to `high`, of BLOCK_N keys each:
    the first `listed_steps` of all walk over the listed blocks, later ones over the positions from
    `nearest` on. at: [rows] positions, of which `last` is the largest. Keys of the window are left
    out of the lists."""
    acc, peak, total = no_sums(q.shape[0], BLOCK_DV)
    for step in range(low, high):
        is_listed = step < listed_steps
        key = step * BLOCK_N
        block = tl.load(places_ptr + key // KEY_BLOCK, mask=is_listed, other=0)
        in_list = block * KEY_BLOCK + key % KEY_BLOCK
        base = tl.where(is_listed, in_list, nearest + key - listed_steps * BLOCK_N)
        positions = base + tl.arange(0, BLOCK_N)
        inside = (positions >= 0) & (positions <= last)  # a negative block has no others
        distance = at[:, None] - positions[None, :]
        # In the lists all that is not in the window, afterwards the window alone.
        least = tl.where(is_listed, window, 0)
        beyond = tl.where(is_listed, _FARTHEST, window)
        seen = (distance >= least) & (distance < beyond)
        visible = rows[:, None] & inside[None, :] & seen
        acc, peak, total = attend(
            q, acc, peak, total, k_ptr, v_ptr, table_W_ptr, positions, inside, visible, scale,
            stride_k_page, stride_k_row, stride_v_page, stride_v_row,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, PAGE,
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def normalised(acc, total):
    """The weighted mean of the values; zero for rows that saw no key."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
