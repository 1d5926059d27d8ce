"""Rotations of a part of a row that is in registers, in Triton.

Of every value, what its place in a row is: the first of the rotated ones is 0, those before it are
negative. Suffixes of tensor names: R rotated values.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated_pairs(
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
def partners_of(columns, START: tl.constexpr, ROTARY: tl.constexpr):
    """Of columns of a row of which ROTARY from START on are rotated, in pairs that are half of them
    apart: the columns of their partners, and which columns have one."""
    half: tl.constexpr = ROTARY // 2
    places = columns - START
    partners = columns + tl.where(places < half, half, -half)
    return partners, (places >= 0) & (places < ROTARY)


@triton.jit
def rotated_by_partners(x, other, places, table_R_ptr, ROTARY: tl.constexpr):
    """float32 of any shape, at these places, with the other value of each pair in `other`; values
    at no place of the rotated ones stay to the bit."""
    half: tl.constexpr = ROTARY // 2
    inside = (places >= 0) & (places < ROTARY)
    is_first = places < half
    pairs = tl.where(is_first, places, places - half)
    cos = tl.load(table_R_ptr + pairs, mask=inside, other=1.0)
    sin = tl.load(table_R_ptr + half + pairs, mask=inside, other=0.0)
    return tl.where(inside, x * cos + tl.where(is_first, -other, other) * sin, x)
