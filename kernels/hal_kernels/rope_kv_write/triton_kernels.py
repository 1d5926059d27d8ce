"""Norms of q and k, rotation and KV write in Triton: each value is read once.

Suffixes of tensor names: T tokens, H query heads, K cached heads, D head size, V size of a value
head, P positions, R the rotated values of a head, S slots of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.cache_rounding import of_cache


@triton.jit
def _pairs(rows, inside, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr):
    """The first and the second of neighbouring values, float32 [BLOCK_H, BLOCK_R] each, loaded
    together; rows, inside: [BLOCK_H, 1], where they begin and whether there are any."""
    both = tl.arange(0, 2 * BLOCK_R)[None, :]
    x = tl.load(rows + both, mask=inside & (both < ROTARY_DIM), other=0.0)
    return tl.split(tl.reshape(x.to(tl.float32), (BLOCK_H, BLOCK_R, 2)))


@triton.jit
def _rotated_heads(
    row_ptr, weight_D_ptr, table_ptr, heads, eps,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first and second values of the rotated pairs of heads of one row and the rest behind
    them, normed first.

    Rounded to the activations' dtype where a norm and a rotation of their own would store."""
    half: tl.constexpr = ROTARY_DIM // 2
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    pairs, tail = tl.arange(0, BLOCK_R), ROTARY_DIM + tl.arange(0, BLOCK_P)
    rows = row_ptr + heads[:, None] * HEAD_DIM
    if IS_INTERLEAVED:
        a, b = _pairs(rows, (heads < HEADS)[:, None], ROTARY_DIM, BLOCK_H, BLOCK_R)
    else:
        inside = (heads < HEADS)[:, None] & (pairs < half)[None, :]
        a = tl.load(rows + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(rows + half + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
    in_tail = (heads < HEADS)[:, None] & (tail < HEAD_DIM)[None, :]
    rest = tl.load(rows + tail[None, :], mask=in_tail, other=0.0)
    if HAS_NORM:
        c = rest.to(tl.float32)
        total = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        scale = (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]
        in_pairs, in_rest = (pairs < half)[None, :], tail < HEAD_DIM
        weights = weight_D_ptr + tl.zeros((1, 1), tl.int32)
        if IS_INTERLEAVED:
            whole = tl.full((1, 1), True, tl.int1)
            weight_a, weight_b = _pairs(weights, whole, ROTARY_DIM, 1, BLOCK_R)
        else:
            at = weights + pairs[None, :]
            weight_a = tl.load(at, mask=in_pairs, other=0.0).to(tl.float32)
            weight_b = tl.load(at + half, mask=in_pairs, other=0.0).to(tl.float32)
        weight_c = tl.load(weight_D_ptr + tail, mask=in_rest, other=0.0).to(tl.float32)
        a = (a * scale * weight_a).to(dtype).to(tl.float32)
        b = (b * scale * weight_b).to(dtype).to(tl.float32)
        rest = (c * scale * weight_c[None, :]).to(dtype)
    cos = tl.load(table_ptr + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + half + pairs, mask=pairs < half, other=0.0).to(tl.float32)[None, :]
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype), rest


@triton.jit
def _store_heads(
    row_ptr, first, second, rest, heads, scale, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_REST: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Write what `_rotated_heads` gave, rounded to the dtype behind the pointer."""
    half: tl.constexpr = ROTARY_DIM // 2
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    pairs = tl.arange(0, BLOCK_R)
    rows = row_ptr + heads[:, None] * HEAD_DIM
    first = of_cache(first, scale, dtype, HAS_SCALES)
    second = of_cache(second, scale, dtype, HAS_SCALES)
    if IS_INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_R)
        inside = (heads < HEADS)[:, None] & (both < ROTARY_DIM)[None, :]
        y = tl.reshape(tl.join(first, second), (BLOCK_H, 2 * BLOCK_R))
        tl.store(rows + both[None, :], y, mask=inside)
    else:
        inside = (heads < HEADS)[:, None] & (pairs < half)[None, :]
        tl.store(rows + pairs[None, :], first, mask=inside)
        tl.store(rows + half + pairs[None, :], second, mask=inside)
    if HAS_REST:
        tail = ROTARY_DIM + tl.arange(0, BLOCK_P)
        in_tail = (heads < HEADS)[:, None] & (tail < HEAD_DIM)[None, :]
        tl.store(rows + tail[None, :], of_cache(rest, scale, dtype, HAS_SCALES), mask=in_tail)


@triton.jit
def _rope_kv_write_kernel(
    q_THD_ptr, k_TKD_ptr, v_TKV_ptr, q_weight_D_ptr, k_weight_D_ptr, positions_T_ptr, table_PR_ptr,
    k_cache_SKD_ptr, v_cache_SKV_ptr, slots_T_ptr, stride_q, stride_k, stride_v, eps,
    k_scale, v_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Program (token, block): blocks of BLOCK_H heads of q, in place, then those of k, then blocks
    of BLOCK_V values of v, into the token's row of the cache.

    BLOCK_R: a power of two of at least ROTARY_DIM / 2; BLOCK_P: one of at least
    HEAD_DIM - ROTARY_DIM, and at least 1. The table has the cosines of a position, then its sines.
    Scales: as of `of_cache`.
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
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, BLOCK_P, HAS_NORM, IS_INTERLEAVED,
        )  # fmt: skip
        # What is not rotated stays where it is, unless it was normed.
        _store_heads(
            row, first, second, rest, heads, 1.0,
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, BLOCK_P, has_rest and HAS_NORM,
            IS_INTERLEAVED, False,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        heads = (block - query_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        first, second, rest = _rotated_heads(
            k_TKD_ptr + token * stride_k, k_weight_D_ptr, table, heads, eps,
            NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, BLOCK_P, HAS_NORM, IS_INTERLEAVED,
        )  # fmt: skip
        _store_heads(
            k_cache_SKD_ptr + slot * (NUM_KV_HEADS * HEAD_DIM), first, second, rest, heads, k_scale,
            NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, BLOCK_H, BLOCK_R, BLOCK_P, has_rest,
            IS_INTERLEAVED, HAS_SCALES,
        )  # fmt: skip
    else:
        offs = (block - query_blocks - key_blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
        v = tl.load(v_TKV_ptr + token * stride_v + offs, mask=offs < V_WIDTH, other=0.0)
        row = v_cache_SKV_ptr + slot * V_WIDTH + offs
        v = of_cache(v, v_scale, v_cache_SKV_ptr.dtype.element_ty, HAS_SCALES)
        tl.store(row, v, mask=offs < V_WIDTH)
