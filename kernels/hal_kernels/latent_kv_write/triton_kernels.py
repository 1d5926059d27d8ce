"""Norm, rotation and rounding of one row a token into a paged cache, and of the queries beside it,
in Triton: each value is read once.

Suffixes of tensor names: T tokens, H query heads, D values of a head or of a row, P positions, R
rotated values. The rounding is that of `kv_write`, from what a norm and a rotation of their own
would store: values of the activations' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.packed_kernels import store_rounded


@triton.jit
def _rotated(
    x, first, table_R_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROTARY: tl.constexpr
):
    """float32 [ROWS, COLUMNS], of which column c of row r is the (first[r] + c)-th of the rotated
    values, or none of them; pairs are neighbours. Cosines of the position, then its sines."""
    half: tl.constexpr = ROTARY // 2
    pairs = (first // 2)[:, None] + tl.arange(0, COLUMNS // 2)[None, :]
    inside = (pairs >= 0) & (pairs < half)
    cos = tl.load(table_R_ptr + pairs, mask=inside, other=1.0)
    sin = tl.load(table_R_ptr + half + pairs, mask=inside, other=0.0)
    a, b = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    # What is not rotated stays to the bit: a product with 0 of what is not finite would not.
    y, z = tl.where(inside, a * cos - b * sin, a), tl.where(inside, b * cos + a * sin, b)
    return tl.reshape(tl.join(y, z), (ROWS, COLUMNS))


@triton.jit
def _normed(x, weight_D_ptr, columns, scale, NORM_DIM: tl.constexpr, dtype: tl.constexpr):
    """The first NORM_DIM values of a row times scale and weight, rounded to dtype; others as they
    are."""
    inside = columns < NORM_DIM
    weight = tl.load(weight_D_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, (x * scale * weight).to(dtype).to(tl.float32), x)


@triton.jit
def _query_heads(
    q_ptr, weight_D_ptr, table_R_ptr, first_head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    Q_START: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """WIDTH values from FIRST on of BLOCK_H heads of a token, in place: all of a head that is
    normed, else those that are rotated."""
    heads, offs = first_head + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    ptrs = q_ptr + heads[:, None] * HEAD_DIM + FIRST + offs[None, :]
    inside = (heads < NUM_HEADS)[:, None] & (offs < WIDTH)[None, :]
    q = tl.load(ptrs, mask=inside, other=0.0)
    x = q.to(tl.float32)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        x = _normed(x, weight_D_ptr, offs[None, :], scale, HEAD_DIM, q.dtype)
    first = tl.full((BLOCK_H,), FIRST - Q_START, tl.int32)
    y = _rotated(x, first, table_R_ptr, BLOCK_H, BLOCK_D, ROTARY)
    tl.store(ptrs, y.to(q.dtype), mask=inside)


@triton.jit
def _latent_kv_write_kernel(
    q_THD_ptr, x_TD_ptr, q_weight_D_ptr, x_weight_D_ptr, positions_T_ptr, table_PR_ptr,
    values_ptr, scales_ptr, tails_ptr, slots_T_ptr,
    stride_q, stride_x, stride_page, stride_row, stride_scale_page, stride_scale_row, scale_start,
    stride_tail_page, stride_tail_row, tail_start, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    Q_START: tl.constexpr, HAS_Q_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, ROW_START: tl.constexpr, NORM_DIM: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, SCALES: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, IS_UE8M0: tl.constexpr,
):  # fmt: skip
    """Program (token, block): blocks of BLOCK_H query heads, then the row.

    A row is GROUPS of GROUP values, then PLAIN ones, as `_kv_write_packed_kernel` has it; SCALES 0
    is a row that is stored in the cache's own dtype. BLOCK_D, BLOCK_G and BLOCK_P are powers of two
    of at least WIDTH, GROUPS and PLAIN. FIRST, WIDTH: as of `_query_heads`.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    values_dim: tl.constexpr = GROUPS * GROUP
    table = table_PR_ptr + tl.load(positions_T_ptr + token).to(tl.int64) * ROTARY
    if block < query_blocks:
        _query_heads(
            q_THD_ptr + token * stride_q, q_weight_D_ptr, table, block * BLOCK_H, eps,
            NUM_HEADS, HEAD_DIM, FIRST, WIDTH, Q_START, ROTARY, HAS_Q_NORM, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    else:
        slot = tl.load(slots_T_ptr + token).to(tl.int64)
        page, row = slot // PAGE, slot % PAGE
        offs_g, offs_k = tl.arange(0, BLOCK_G), tl.arange(0, GROUP)
        offs = offs_g[:, None] * GROUP + offs_k[None, :]
        inside = (offs_g < GROUPS)[:, None] & (offs_k >= 0)[None, :]
        row_ptr = x_TD_ptr + token * stride_x
        given = tl.load(row_ptr + offs, mask=inside, other=0.0)
        dtype: tl.constexpr = given.dtype
        x = given.to(tl.float32)
        offs_p = tl.arange(0, BLOCK_P)[None, :]
        in_tail = offs_p < PLAIN
        tail = tl.zeros((1, BLOCK_P), tl.float32)
        if PLAIN > 0:
            tail = tl.load(row_ptr + values_dim + offs_p, mask=in_tail, other=0.0).to(tl.float32)
        if NORM_DIM > 0:
            total = tl.sum(tl.sum(tl.where(offs < NORM_DIM, x * x, 0.0), axis=1), axis=0)
            if values_dim < NORM_DIM:
                is_normed = offs_p < NORM_DIM - values_dim
                total += tl.sum(tl.sum(tl.where(is_normed, tail * tail, 0.0), axis=1), axis=0)
            scale = 1.0 / tl.sqrt(total / NORM_DIM + eps)
            x = _normed(x, x_weight_D_ptr, offs, scale, NORM_DIM, dtype)
            if values_dim < NORM_DIM:
                tail = _normed(
                    tail, x_weight_D_ptr + values_dim, offs_p, scale, NORM_DIM - values_dim, dtype
                )
        if values_dim > ROW_START:
            x = _rotated(x, offs_g * GROUP - ROW_START, table, BLOCK_G, GROUP, ROTARY)
            x = x.to(dtype).to(tl.float32)
        values_row = values_ptr + page * stride_page + row * stride_row
        if SCALES == 0:
            tl.store(values_row + offs, x.to(values_ptr.dtype.element_ty), mask=inside)
        else:
            store_rounded(
                x, values_row,
                scales_ptr + page * stride_scale_page + row * stride_scale_row + scale_start,
                offs, inside, offs_g, GROUPS, GROUP, BLOCK_G, SCALES, IS_UE8M0,
            )  # fmt: skip
        if PLAIN > 0:
            first = tl.full((1,), values_dim - ROW_START, tl.int32)
            tail = _rotated(tail, first, table, 1, BLOCK_P, ROTARY)
            tail_row = tails_ptr + page * stride_tail_page + row * stride_tail_row + tail_start
            tl.store(tail_row + offs_p, tail.to(dtype).to(tl.bfloat16), mask=in_tail)
