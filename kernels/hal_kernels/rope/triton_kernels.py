"""Rotary position embedding in Triton, in place, on q and k in one launch.

Suffixes of tensor names: T tokens, H query heads, K cached heads, D head size, P positions, R the
rotated values of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotate(
    row_ptr, first_head, cos, sin, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one row. The pointer is one of the kernel's own, not a choice between two:
    of that the compiler knows no alignment, and loads value by value."""
    half: tl.constexpr = ROTARY_DIM // 2
    heads = first_head + tl.arange(0, BLOCK_H)
    rows = row_ptr + heads[:, None] * HEAD_DIM
    if IS_INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_R)
        inside = (heads < HEADS)[:, None] & (both < ROTARY_DIM)[None, :]
        x = tl.load(rows + both[None, :], mask=inside, other=0.0)
        a, b = tl.split(tl.reshape(x.to(tl.float32), (BLOCK_H, BLOCK_R, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BLOCK_H, 2 * BLOCK_R))
        tl.store(rows + both[None, :], y.to(x.dtype), mask=inside)
    else:
        pairs = tl.arange(0, BLOCK_R)
        inside = (heads < HEADS)[:, None] & (pairs < half)[None, :]
        first_ptrs, second_ptrs = rows + pairs[None, :], rows + half + pairs[None, :]
        first = tl.load(first_ptrs, mask=inside, other=0.0)
        second = tl.load(second_ptrs, mask=inside, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        tl.store(first_ptrs, (a * cos - b * sin).to(first.dtype), mask=inside)
        tl.store(second_ptrs, (b * cos + a * sin).to(second.dtype), mask=inside)


@triton.jit
def _rope_kernel(
    q_THD_ptr, k_TKD_ptr, positions_T_ptr, table_PR_ptr, stride_q, stride_k,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROTARY_START: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_INVERSE: tl.constexpr,
):  # fmt: skip
    """Program (token, p): of the blocks of BLOCK_H heads, those of q and then those of k, every one
    whose number is p modulo the programs of a token. One program reads a token's cosines and sines
    once; as many as there are blocks end soonest. BLOCK_R is a power of two of at least
    ROTARY_DIM / 2. The table has the cosines of a position, then its sines, in float32."""
    token, mine, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    half: tl.constexpr = ROTARY_DIM // 2
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    pairs = tl.arange(0, BLOCK_R)
    row = table_PR_ptr + tl.load(positions_T_ptr + token).to(tl.int64) * ROTARY_DIM
    cos = tl.load(row + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    if IS_INVERSE:
        sin = -sin
    for first in range(mine * BLOCK_H, NUM_HEADS, programs * BLOCK_H):
        _rotate(
            q_THD_ptr + token * stride_q + ROTARY_START, first, cos, sin,
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, IS_INTERLEAVED,
        )  # fmt: skip
    if NUM_KV_HEADS > 0:
        next_block = (mine + programs * query_blocks - query_blocks) % programs
        for first in range(next_block * BLOCK_H, NUM_KV_HEADS, programs * BLOCK_H):
            _rotate(
                k_TKD_ptr + token * stride_k + ROTARY_START, first, cos, sin,
                NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, IS_INTERLEAVED,
            )  # fmt: skip
