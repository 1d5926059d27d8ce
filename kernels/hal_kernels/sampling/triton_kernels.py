"""Top-k and top-p filter of logits in Triton: one row per program, without a sort.

The smallest kept logit is found by its bits, four at a time: eight passes over the row count (or
weigh) what is at least as large as each of sixteen bounds. Suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """float32 as uint32 codes of the same order; zeros are equal, NaN is the largest."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # minus zero becomes zero
    code = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(x == x, code, 0xFFC00000)


@triton.jit
def _weights(x, largest, IS_MASS: tl.constexpr):
    """exp(x - largest), or 1 to count."""
    if IS_MASS:
        weight = tl.exp(x - largest)
    else:
        weight = tl.zeros_like(x) + 1.0
    return weight


@triton.jit
def _bound(
    row_ptr, V, target, above, largest,
    BLOCK_V: tl.constexpr, PARTS: tl.constexpr, IS_MASS: tl.constexpr,
):  # fmt: skip
    """The largest code c such that the weight of the logits with a code >= c is at least `target`;
    only logits above the code `above` weigh. PARTS: 1, or 2 for half the sums in a thread, to which
    the even and the odd logits are added after each other."""
    offs, digits = tl.arange(0, BLOCK_V), tl.arange(0, 16).to(tl.uint32)
    found = tl.zeros((1,), dtype=tl.uint32)
    unit = tl.full((1,), 1 << 28, dtype=tl.uint32)
    for _ in range(8):
        bounds = found + digits * unit
        acc = tl.zeros((BLOCK_V // PARTS, 16), dtype=tl.float32)
        for start in range(0, V, BLOCK_V):
            inside = start + offs < V
            x = tl.load(row_ptr + start + offs, mask=inside, other=float("-inf"))
            code = _ordered(x)
            weighs = inside & (code > above)
            weight = tl.where(weighs, _weights(x, largest, IS_MASS), 0.0)
            if PARTS == 2:
                codes = tl.split(tl.reshape(code, (BLOCK_V // 2, 2)))
                weights = tl.split(tl.reshape(weight, (BLOCK_V // 2, 2)))
                for i in tl.static_range(2):
                    reaches = codes[i][:, None] >= bounds[None, :]
                    acc += tl.where(reaches, weights[i][:, None], 0.0)
            else:
                acc += tl.where(code[:, None] >= bounds[None, :], weight[:, None], 0.0)
        reached = tl.sum(acc, axis=0) >= target
        found += tl.max(tl.where(reached, digits, 0), axis=0) * unit
        unit = unit >> 4
    return tl.max(found, axis=0)


@triton.jit
def _weight_above(row_ptr, V, bound, largest, BLOCK_V: tl.constexpr, IS_MASS: tl.constexpr):
    """Weight of the logits whose code is larger than `bound`."""
    offs = tl.arange(0, BLOCK_V)
    acc = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        inside = start + offs < V
        x = tl.load(row_ptr + start + offs, mask=inside, other=float("-inf"))
        weighs = inside & (_ordered(x) > bound)
        acc += tl.where(weighs, _weights(x, largest, IS_MASS), 0.0)
    return tl.sum(acc, axis=0)


@triton.jit
def _largest_code(row_ptr, V, BLOCK_V: tl.constexpr):
    offs = tl.arange(0, BLOCK_V)
    most = tl.zeros((BLOCK_V,), dtype=tl.uint32)
    for start in range(0, V, BLOCK_V):
        x = tl.load(row_ptr + start + offs, mask=start + offs < V, other=float("-inf"))
        most = tl.maximum(most, _ordered(x))
    return tl.max(most, axis=0)


@triton.jit
def _value_of(code):
    bits = tl.where(code >= 0x80000000, code & 0x7FFFFFFF, ~code)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _top_k_top_p_kernel(
    logits_BV_ptr, top_k_B_ptr, top_p_B_ptr, y_BV_ptr, stride_logits, V,
    BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """y = logits, -inf but for the k largest (the first of equal ones) and of these the fewest,
    the largest first, whose probability reaches top_p.

    What is kept is all above the code `cut`, and the first `ties` with that code. V < 2**24, so
    that counts are exact in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = logits_BV_ptr + row * stride_logits
    k = tl.minimum(tl.maximum(tl.load(top_k_B_ptr + row), 1), V).to(tl.float32)
    top_p = tl.load(top_p_B_ptr + row)
    cut = tl.zeros((1,), dtype=tl.uint32)
    ties = tl.zeros((1,), dtype=tl.float32)
    if k < V:
        cut += _bound(logits, V, k, 0, 0.0, BLOCK_V, PARTS, False)
        ties += k - _weight_above(logits, V, cut, 0.0, BLOCK_V, False)
    most = _largest_code(logits, V, BLOCK_V)
    # With an infinite or undefined largest logit there is no distribution to cut.
    if (top_p < 1.0) & (most > 0x007FFFFF) & (most < 0xFF800000):
        largest = _value_of(most)
        mass = _weight_above(logits, V, cut, largest, BLOCK_V, True)
        mass += tl.where(ties > 0.0, ties * tl.exp(_value_of(cut) - largest), 0.0)
        target = tl.maximum(top_p * mass, 1e-30)
        bound = _bound(logits, V, target, cut, largest, BLOCK_V, PARTS, True)
        bound = tl.maximum(bound, cut)
        missing = target - _weight_above(logits, V, bound, largest, BLOCK_V, True)
        weight = tl.exp(_value_of(bound) - largest)
        wanted = tl.where(weight > 0.0, tl.minimum(tl.ceil(missing / weight), 16777216.0), 1.0)
        wanted = tl.maximum(wanted, 1.0)
        ties = tl.where(bound == cut, tl.minimum(ties, wanted), wanted)
        cut = bound
    offs = tl.arange(0, BLOCK_V)
    before = tl.zeros((1,), dtype=tl.int32)
    for start in range(0, V, BLOCK_V):
        inside = start + offs < V
        x = tl.load(logits + start + offs, mask=inside, other=float("-inf"))
        code = _ordered(x)
        is_tie = (inside & (code == cut)).to(tl.int32)
        rank = before + tl.cumsum(is_tie, axis=0) - is_tie
        is_kept = (code > cut) | ((is_tie > 0) & (rank < ties.to(tl.int32)))
        tl.store(y_BV_ptr + row * V + start + offs, tl.where(is_kept, x, float("-inf")), inside)
        before += tl.sum(is_tie, axis=0)
