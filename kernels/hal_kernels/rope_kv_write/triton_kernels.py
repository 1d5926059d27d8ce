"""Norms of q and k, rotation and KV write in Triton: each value is read once.

Suffixes of tensor names: T tokens, H query heads, K cached heads, D head size, V size of a value
head, P positions, R the rotated values of a head, S slots of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated_heads(
    row_ptr, weight_D_ptr, table_ptr, heads, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """The two rotated halves of heads of one row and the rest behind them, normed first.

    Rounded to the activations' dtype where a norm and a rotation of their own would store."""
    half: tl.constexpr = ROTARY_DIM // 2
    pairs, tail = tl.arange(0, BLOCK_R), ROTARY_DIM + tl.arange(0, BLOCK_P)
    rows = row_ptr + heads[:, None] * HEAD_DIM
    inside = (heads < HEADS)[:, None] & (pairs < half)[None, :]
    first = tl.load(rows + pairs[None, :], mask=inside, other=0.0)
    second = tl.load(rows + half + pairs[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    in_tail = (heads < HEADS)[:, None] & (tail < HEAD_DIM)[None, :]
    rest = tl.load(rows + tail[None, :], mask=in_tail, other=0.0)
    if HAS_NORM:
        c = rest.to(tl.float32)
        total = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        scale = (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]
        in_pairs, in_rest = pairs < half, tail < HEAD_DIM
        weight_a = tl.load(weight_D_ptr + pairs, mask=in_pairs, other=0.0).to(tl.float32)
        weight_b = tl.load(weight_D_ptr + half + pairs, mask=in_pairs, other=0.0).to(tl.float32)
        weight_c = tl.load(weight_D_ptr + tail, mask=in_rest, other=0.0).to(tl.float32)
        a = (a * scale * weight_a[None, :]).to(dtype).to(tl.float32)
        b = (b * scale * weight_b[None, :]).to(dtype).to(tl.float32)
        rest = (c * scale * weight_c[None, :]).to(dtype)
    cos = tl.load(table_ptr + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype), rest


@triton.jit
def _store_heads(
    row_ptr, first, second, rest, heads, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Write what `_rotated_heads` gave, rounded to the dtype behind the pointer."""
    half: tl.constexpr = ROTARY_DIM // 2
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    pairs = tl.arange(0, BLOCK_R)
    rows = row_ptr + heads[:, None] * HEAD_DIM
    inside = (heads < HEADS)[:, None] & (pairs < half)[None, :]
    tl.store(rows + pairs[None, :], first.to(dtype), mask=inside)
    tl.store(rows + half + pairs[None, :], second.to(dtype), mask=inside)
    if HAS_REST:
        tail = ROTARY_DIM + tl.arange(0, BLOCK_P)
        in_tail = (heads < HEADS)[:, None] & (tail < HEAD_DIM)[None, :]
        tl.store(rows + tail[None, :], rest.to(dtype), mask=in_tail)


@triton.jit
def _rope_kv_write_kernel(
    q_THD_ptr, k_TKD_ptr, v_TKV_ptr, q_weight_D_ptr, k_weight_D_ptr, positions_T_ptr, table_PR_ptr,
    k_cache_SKD_ptr, v_cache_SKV_ptr, slots_T_ptr, stride_q, stride_k, stride_v, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, block): blocks of BLOCK_H heads of q, in place, then those of k, then blocks
    of BLOCK_V values of v, into the token's row of the cache.

    BLOCK_R: a power of two of at least ROTARY_DIM / 2; BLOCK_P: one of at least
    HEAD_DIM - ROTARY_DIM, and at least 1. The table has the cosines of a position, then its sines.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    key_blocks: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    has_rest: tl.constexpr = HEAD_DIM > ROTARY_DIM
    table = table_PR_ptr + tl.load(positions_T_ptr + token).to(tl.int64) * ROTARY_DIM
    slot = tl.load(slots_T_ptr + token).to(tl.int64)
    if block < query_blocks:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        row = q_THD_ptr + token * stride_q
        first, second, rest = _rotated_heads(
            row, q_weight_D_ptr, table, heads, eps,
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_R, BLOCK_P, HAS_NORM,
        )  # fmt: skip
        # What is not rotated stays where it is, unless it was normed.
        _store_heads(
            row, first, second, rest, heads,
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_R, BLOCK_P, has_rest and HAS_NORM,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        heads = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        first, second, rest = _rotated_heads(
            k_TKD_ptr + token * stride_k, k_weight_D_ptr, table, heads, eps,
            NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_R, BLOCK_P, HAS_NORM,
        )  # fmt: skip
        _store_heads(
            k_cache_SKD_ptr + slot * (NUM_KV_HEADS * HEAD_DIM), first, second, rest, heads,
            NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_R, BLOCK_P, has_rest,
        )  # fmt: skip
    else:
        offs = (block - query_blocks - key_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        v = tl.load(v_TKV_ptr + token * stride_v + offs, mask=offs < V_WIDTH, other=0.0)
        row = v_cache_SKV_ptr + slot * V_WIDTH + offs
        tl.store(row, v.to(v_cache_SKV_ptr.dtype.element_ty), mask=offs < V_WIDTH)
