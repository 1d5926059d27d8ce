"""Rotary position embedding in Triton, in place, on q and k in one launch.

Suffixes of tensor names: T tokens, H query heads, K cached heads, D head size, P positions, R the
rotated values of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rope_kernel(
    q_THD_ptr, k_TKD_ptr, positions_T_ptr, table_PR_ptr, stride_q, stride_k,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROTARY_START: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_INVERSE: tl.constexpr,
):  # fmt: skip
    """Program (token, block of BLOCK_H heads of q and then of k). BLOCK_R is a power of two of at
    least ROTARY_DIM / 2. The table has the cosines of a position, then its sines, in float32."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = ROTARY_DIM // 2
    pairs = tl.arange(0, BLOCK_R)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = table_PR_ptr + tl.load(positions_T_ptr + token).to(tl.int64) * ROTARY_DIM
    cos = tl.load(row + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(row + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    if IS_INVERSE:
        sin = -sin
    is_query = heads < NUM_HEADS
    q_rows = q_THD_ptr + token * stride_q + heads * HEAD_DIM
    k_rows = k_TKD_ptr + token * stride_k + (heads - NUM_HEADS) * HEAD_DIM
    rows = tl.where(is_query, q_rows, k_rows)[:, None] + ROTARY_START
    inside = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None] & (pairs < half)[None, :]
    if IS_INTERLEAVED:
        first_ptrs, second_ptrs = rows + 2 * pairs[None, :], rows + 2 * pairs[None, :] + 1
    else:
        first_ptrs, second_ptrs = rows + pairs[None, :], rows + half + pairs[None, :]
    first = tl.load(first_ptrs, mask=inside, other=0.0)
    second = tl.load(second_ptrs, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(first_ptrs, (a * cos - b * sin).to(first.dtype), mask=inside)
    tl.store(second_ptrs, (b * cos + a * sin).to(second.dtype), mask=inside)
