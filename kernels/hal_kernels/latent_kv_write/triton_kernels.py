"""Norm, rotation and rounding of one row a token into a paged cache, and of the queries beside it,
in Triton: each value comes from memory once.

Suffixes of tensor names: T tokens, H query heads, D values of a head or of a row, P positions, R
rotated values. The rounding is that of `kv_write`, from what a norm and a rotation of their own
would store: values of the activations' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.kv_write.fp4_kernels import store_rounded_to_fp4
from hal_kernels.kv_write.packed_kernels import store_rounded
from hal_kernels.latent_kv_write.rotation import partners_of, rotated_by_partners, rotated_pairs

# What a kernel is told about the norm of a row.
RMS = tl.constexpr(1)
LAYER = tl.constexpr(2)


@triton.jit
def _normed(
    x, weight_D_ptr, bias_D_ptr, columns, centre, scale,
    NORM: tl.constexpr, NORM_DIM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Those of the first NORM_DIM values of a row, rounded to dtype; others as they are."""
    inside = columns < NORM_DIM
    weight = tl.load(weight_D_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM == LAYER:
        bias = tl.load(bias_D_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y = (x - centre) * scale * weight + bias
    else:
        y = x * scale * weight
    return tl.where(inside, y.to(dtype).to(tl.float32), x)


@triton.jit
def _sum(x, inside):
    """Of the values inside, of a tile of two axes."""
    return tl.sum(tl.sum(tl.where(inside, x, 0.0), axis=1), axis=0)


@triton.jit
def _query_heads(
    q_ptr, weight_D_ptr, table_R_ptr, first_head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    Q_START: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """WIDTH values from FIRST on of BLOCK_H heads of a token, in place: all of a head that is
    normed, else those that are rotated. Pairs are neighbours."""
    heads, offs = first_head + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    ptrs = q_ptr + heads[:, None] * HEAD_DIM + FIRST + offs[None, :]
    inside = (heads < NUM_HEADS)[:, None] & (offs < WIDTH)[None, :]
    q = tl.load(ptrs, mask=inside, other=0.0)
    x = q.to(tl.float32)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        x = _normed(
            x, weight_D_ptr, weight_D_ptr, offs[None, :], 0.0, scale, RMS, HEAD_DIM, q.dtype
        )
    first = tl.full((BLOCK_H,), FIRST - Q_START, tl.int32)
    y = rotated_pairs(x, first, table_R_ptr, BLOCK_H, BLOCK_D, ROTARY)
    tl.store(ptrs, y.to(q.dtype), mask=inside)


@triton.jit
def _query_halves(
    q_ptr, weight_D_ptr, table_R_ptr, first_head, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, Q_START: tl.constexpr, ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """As `_query_heads`, with pairs that are half of the rotated values apart: a thread holds both
    values of its pairs, so that none is overwritten before it is read. BLOCK_D, BLOCK_R: powers of
    two of at least HEAD_DIM, where heads are normed, and ROTARY / 2."""
    half: tl.constexpr = ROTARY // 2
    heads, pairs = first_head + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    rows = q_ptr + heads[:, None] * HEAD_DIM
    first_ptrs = rows + Q_START + pairs[None, :]
    inside = (heads < NUM_HEADS)[:, None] & (pairs < half)[None, :]
    first = tl.load(first_ptrs, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    a = first.to(tl.float32)
    b = tl.load(first_ptrs + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        offs = tl.arange(0, BLOCK_D)[None, :]
        in_head = (heads < NUM_HEADS)[:, None] & (offs < HEAD_DIM)
        x = tl.load(rows + offs, mask=in_head, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps))[:, None]
        x = _normed(x, weight_D_ptr, weight_D_ptr, offs, 0.0, scale, RMS, HEAD_DIM, dtype)
        is_rest = in_head & ((offs < Q_START) | (offs >= Q_START + ROTARY))
        tl.store(rows + offs, x.to(dtype), mask=is_rest)
        # What is stored depends on the scale, so on every value of the head: all are read by then.
        at = Q_START + pairs[None, :]
        a = _normed(a, weight_D_ptr, weight_D_ptr, at, 0.0, scale, RMS, HEAD_DIM, dtype)
        b = _normed(b, weight_D_ptr, weight_D_ptr, at + half, 0.0, scale, RMS, HEAD_DIM, dtype)
    cos = tl.load(table_R_ptr + pairs, mask=pairs < half, other=0.0)[None, :]
    sin = tl.load(table_R_ptr + half + pairs, mask=pairs < half, other=0.0)[None, :]
    tl.store(first_ptrs, (a * cos - b * sin).to(dtype), mask=inside)
    tl.store(first_ptrs + half, (b * cos + a * sin).to(dtype), mask=inside)


@triton.jit
def _latent_kv_write_kernel(
    q_THD_ptr, x_TD_ptr, q_weight_D_ptr, x_weight_D_ptr, x_bias_D_ptr, positions_T_ptr,
    table_PR_ptr, values_ptr, scales_ptr, tails_ptr, slots_T_ptr,
    stride_q, stride_x, stride_page, stride_row, stride_scale_page, stride_scale_row, scale_start,
    stride_tail_page, stride_tail_row, tail_start, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    Q_START: tl.constexpr, HAS_Q_NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, IS_INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr,
    ROW_START: tl.constexpr, NORM: tl.constexpr, NORM_DIM: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, SCALES: tl.constexpr,
    PLAIN: tl.constexpr, BLOCK_P: tl.constexpr, PAGE: tl.constexpr, IS_UE8M0: tl.constexpr,
    IS_FP4: tl.constexpr,
):  # fmt: skip
    """Program (token, block): blocks of BLOCK_H query heads, then the row.

    A row is GROUPS of GROUP values, then PLAIN ones, as `_kv_write_packed_kernel` has it; SCALES 0
    is a row that is stored in the cache's own dtype. NORM: of the first NORM_DIM values of a row,
    `RMS`, `LAYER` or 0. BLOCK_D, BLOCK_G and BLOCK_P are powers of two of at least WIDTH, GROUPS
    and PLAIN. FIRST, WIDTH, BLOCK_R: as of `_query_heads` and `_query_halves`.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    table = table_PR_ptr + tl.load(positions_T_ptr + token).to(tl.int64) * ROTARY
    if block < query_blocks:
        q_ptr = q_THD_ptr + token * stride_q
        if IS_INTERLEAVED:
            _query_heads(
                q_ptr, q_weight_D_ptr, table, block * BLOCK_H, eps,
                NUM_HEADS, HEAD_DIM, FIRST, WIDTH, Q_START, ROTARY, HAS_Q_NORM, BLOCK_H, BLOCK_D,
            )  # fmt: skip
        else:
            _query_halves(
                q_ptr, q_weight_D_ptr, table, block * BLOCK_H, eps,
                NUM_HEADS, HEAD_DIM, Q_START, ROTARY, HAS_Q_NORM, BLOCK_H, BLOCK_D, BLOCK_R,
            )  # fmt: skip
    else:
        slot = tl.load(slots_T_ptr + token).to(tl.int64)
        page, row = slot // PAGE, slot % PAGE
        values_dim: tl.constexpr = GROUPS * GROUP
        offs_g, offs_k = tl.arange(0, BLOCK_G), tl.arange(0, GROUP)
        offs = offs_g[:, None] * GROUP + offs_k[None, :]
        inside = (offs_g < GROUPS)[:, None] & (offs_k >= 0)[None, :]
        row_ptr = x_TD_ptr + token * stride_x
        given = tl.load(row_ptr + offs, mask=inside, other=0.0)
        dtype: tl.constexpr = given.dtype
        x = given.to(tl.float32)
        offs_p = tl.arange(0, BLOCK_P)[None, :]
        in_tail, at_tail = offs_p < PLAIN, values_dim + offs_p
        tail = tl.zeros((1, BLOCK_P), tl.float32)
        if PLAIN > 0:
            tail = tl.load(row_ptr + at_tail, mask=in_tail, other=0.0).to(tl.float32)
        centre, scale = 0.0, 1.0
        if NORM > 0:
            is_normed, tail_is_normed = offs < NORM_DIM, in_tail & (at_tail < NORM_DIM)
            if NORM == LAYER:
                centre = _sum(x, is_normed)
                if values_dim < NORM_DIM:
                    centre += _sum(tail, tail_is_normed)
                centre = centre / NORM_DIM
            # The row stays in registers: the variance is of centred values, which cancels nothing.
            total = _sum((x - centre) * (x - centre), is_normed)
            if values_dim < NORM_DIM:
                total += _sum((tail - centre) * (tail - centre), tail_is_normed)
            scale = 1.0 / tl.sqrt(total / NORM_DIM + eps)
            x = _normed(x, x_weight_D_ptr, x_bias_D_ptr, offs, centre, scale, NORM, NORM_DIM, dtype)
            if values_dim < NORM_DIM:
                tail = _normed(
                    tail, x_weight_D_ptr, x_bias_D_ptr, at_tail, centre, scale, NORM, NORM_DIM,
                    dtype,
                )  # fmt: skip
        if values_dim > ROW_START:
            if IS_INTERLEAVED:
                x = rotated_pairs(x, offs_g * GROUP - ROW_START, table, BLOCK_G, GROUP, ROTARY)
            else:
                at, is_turned = partners_of(offs, ROW_START, ROTARY)
                other = tl.load(row_ptr + at, mask=is_turned, other=0.0).to(tl.float32)
                if NORM > 0:
                    other = _normed(
                        other, x_weight_D_ptr, x_bias_D_ptr, at, centre, scale, NORM, NORM_DIM,
                        dtype,
                    )  # fmt: skip
                x = rotated_by_partners(x, other, offs - ROW_START, table, ROTARY)
            x = x.to(dtype).to(tl.float32)
        values_row = values_ptr + page * stride_page + row * stride_row
        scales_row = scales_ptr + page * stride_scale_page + row * stride_scale_row + scale_start
        if SCALES == 0:
            tl.store(values_row + offs, x.to(values_ptr.dtype.element_ty), mask=inside)
        elif IS_FP4:
            store_rounded_to_fp4(x, values_row, scales_row, GROUPS, GROUP, IS_UE8M0)
        else:
            store_rounded(
                x, values_row, scales_row, offs, inside, offs_g,
                GROUPS, GROUP, BLOCK_G, SCALES, IS_UE8M0,
            )  # fmt: skip
        if PLAIN > 0:
            if IS_INTERLEAVED:
                first = tl.full((1,), values_dim - ROW_START, tl.int32)
                tail = rotated_pairs(tail, first, table, 1, BLOCK_P, ROTARY)
            else:
                at, is_turned = partners_of(at_tail, ROW_START, ROTARY)
                other = tl.load(row_ptr + at, mask=is_turned & in_tail, other=0.0).to(tl.float32)
                if values_dim < NORM_DIM:
                    other = _normed(
                        other, x_weight_D_ptr, x_bias_D_ptr, at, centre, scale, NORM, NORM_DIM,
                        dtype,
                    )  # fmt: skip
                tail = rotated_by_partners(tail, other, at_tail - ROW_START, table, ROTARY)
            tail_row = tails_ptr + page * stride_tail_page + row * stride_tail_row + tail_start
            tl.store(tail_row + offs_p, tail.to(dtype).to(tl.bfloat16), mask=in_tail)
