"""Dispatch to experts in Triton: stable places by expert, the rows moved, the weighted sums.

Suffixes of tensor names: T tokens, K experts of a token, F = T * K choices, E experts, M rows in
the order of experts, D hidden size. Every row is written once and every sum has a fixed order, so
results do not depend on how programs are scheduled.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _moe_places_kernel(
    ids_F_ptr, places_F_ptr, source_F_ptr, offsets_ptr, F, E: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Program e: where the choices of expert e go. offsets[E + 2]: first row of each expert, their
    end, and the number of ids that are no expert's. An id of -1 has no place. Program E: the source
    of the places that nobody has is -1, after those of the choices whose id is no expert's: -2 - f
    of choice f, which tells the sum that something is missing.

    Each program reads all ids, once to count those before it and once to number its own: nothing
    is passed between programs, and a decode is one step of each loop.
    """
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK_F)
    before = tl.zeros((BLOCK_F,), dtype=tl.int32)
    for start in range(0, F, BLOCK_F):
        ids = tl.load(ids_F_ptr + start + offs, mask=start + offs < F, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    first = tl.sum(before, axis=0)
    tl.store(offsets_ptr + expert, first.to(tl.int64))
    if expert == E:
        free = first
        for start in range(0, F, BLOCK_F):
            choice = start + offs
            ids = tl.load(ids_F_ptr + choice, mask=choice < F, other=-1)
            is_foreign = ((ids < -1) | (ids >= E)).to(tl.int32)
            place = free + tl.cumsum(is_foreign, axis=0) - 1
            tl.store(source_F_ptr + place, -2 - choice, mask=is_foreign > 0)
            free += tl.sum(is_foreign, axis=0)
        tl.store(offsets_ptr + E + 1, (free - first).to(tl.int64))
        for start in range(0, F, BLOCK_F):
            place = start + offs
            tl.store(source_F_ptr + place, -1, mask=(place >= free) & (place < F))
    else:
        for start in range(0, F, BLOCK_F):
            ids = tl.load(ids_F_ptr + start + offs, mask=start + offs < F, other=-1)
            is_own = (ids == expert).to(tl.int32)
            place = first + tl.cumsum(is_own, axis=0) - 1
            tl.store(places_F_ptr + start + offs, place, mask=is_own > 0)
            tl.store(source_F_ptr + place, start + offs, mask=is_own > 0)
            first += tl.sum(is_own, axis=0)


@triton.jit
def _moe_spread_kernel(
    x_TD_ptr, ids_TK_ptr, places_TK_ptr, rows_MD_ptr, stride_x, D, E,
    TOP_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): the token's row is read once and written to its places.
    Where one of its ids is of no expert, what is written is NaN: who sums the rows in another way
    than the kernel here must not find a sum of fewer experts."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = offs < D
    x = tl.load(x_TD_ptr + token * stride_x + offs, mask=inside, other=0.0)
    is_foreign = 0
    for j in range(TOP_K):
        expert = tl.load(ids_TK_ptr + token * TOP_K + j)
        is_foreign |= ((expert < -1) | (expert >= E)).to(tl.int32)
    no_number = tl.full((BLOCK_D,), float("nan"), tl.float32).to(x_TD_ptr.dtype.element_ty)
    x = tl.where(is_foreign > 0, no_number, x)
    for j in range(TOP_K):
        expert = tl.load(ids_TK_ptr + token * TOP_K + j)
        if (expert >= 0) & (expert < E):
            place = tl.load(places_TK_ptr + token * TOP_K + j).to(tl.int64)
            tl.store(rows_MD_ptr + place * D + offs, x, mask=inside)


@triton.jit
def _moe_invert_kernel(source_M_ptr, places_F_ptr, M, BLOCK_M: tl.constexpr):
    """places[source[m]] = m. A source of -1 is of no row; one below it is of choice -2 - source,
    whose id is no expert's: its place is -2."""
    offs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    source = tl.load(source_M_ptr + offs, mask=offs < M, other=-1)
    is_foreign = source < -1
    choice = tl.where(is_foreign, -2 - source, source)
    tl.store(places_F_ptr + choice, tl.where(is_foreign, -2, offs), mask=source != -1)


@triton.jit
def _moe_combine_kernel(
    y_MD_ptr, places_TK_ptr, weights_TK_ptr, out_TD_ptr, stride_y, D,
    TOP_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): the weighted sum of the token's rows in the order of its
    choices, in float32; a choice whose place is -1 has no row here, one of -2 makes the sum NaN."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for j in range(TOP_K):
        place = tl.load(places_TK_ptr + token * TOP_K + j).to(tl.int64)
        weight = tl.load(weights_TK_ptr + token * TOP_K + j).to(tl.float32)
        columns = tl.where(place >= 0, D, 0)
        y = tl.load(y_MD_ptr + place * stride_y + offs, mask=offs < columns, other=0.0)
        # The weight of a choice without a row may be anything.
        missing = tl.where(place < -1, float("nan"), 0.0)
        acc += tl.where(place >= 0, y.to(tl.float32) * weight, missing)
    tl.store(out_TD_ptr + token * D + offs, acc.to(out_TD_ptr.dtype.element_ty), mask=offs < D)
