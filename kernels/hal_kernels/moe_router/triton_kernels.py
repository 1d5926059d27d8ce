"""Choice of experts in Triton: one program a token, its scores in registers.

Suffixes of tensor names: T tokens, E experts, K experts of a token, V vocabulary. Scores are in
float32. Of equal scores the lower index wins, and a NaN is larger than everything, as in a stable
descending sort.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ranked(score, index):
    """int64 keys that order as (score, lower index first); a bare maximum then is the choice."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # minus zero becomes zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score == score, ordered, 0x7FC00000)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))), to float32's precision where exp(x) vanishes beside 1."""
    small = tl.exp(-tl.abs(x))
    near = 1.0 + small
    # What rounding took from 1 + small is given back by the ratio.
    log = tl.where(near == 1.0, small, tl.log(near) * (small / (near - 1.0)))
    return tl.sqrt(tl.maximum(x, 0.0) + tl.where(x == x, log, x))


@triton.jit
def _in_picked_groups(choice, G: tl.constexpr, PICKED: tl.constexpr, E: tl.constexpr):
    """choice [E] with -inf outside the PICKED groups with the largest sum of their two best."""
    grouped = tl.reshape(choice, (G, E // G))
    offs_e = tl.arange(0, E // G)[None, :]
    best = tl.max(grouped, axis=1)
    at = tl.min(tl.where(grouped == best[:, None], offs_e, E), axis=1)
    second = tl.max(tl.where(offs_e == at[:, None], float("-inf"), grouped), axis=1)
    has_nan = tl.max((grouped != grouped).to(tl.int32), axis=1) > 0
    total = tl.where(has_nan, float("nan"), best + second)
    offs_g = tl.arange(0, G)
    keys = _ranked(total, offs_g)
    is_picked = tl.zeros((G,), dtype=tl.int32)
    for _ in range(PICKED):
        group = _index_of(tl.max(keys, axis=0))
        is_picked = tl.where(offs_g == group, 1, is_picked)
        keys = tl.where(offs_g == group, -0x7FFFFFFFFFFFFFFF, keys)
    return tl.reshape(tl.where(is_picked[:, None] > 0, grouped, float("-inf")), (E,))


@triton.jit
def _moe_router_kernel(
    logits_TE_ptr, bias_E_ptr, weights_TK_ptr, ids_TK_ptr, stride_logits, E, route_scale,
    BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZES: tl.constexpr, G: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """weights, ids = the TOP_K experts of a token by falling score (+ bias in the choice only).

    SCORING: 0 softmax, 1 sigmoid, 2 sqrt-softplus. BLOCK_E: a power of two of at least E, equal to
    it if G > PICKED (then also G is one). BLOCK_K: a power of two of at least TOP_K.
    """
    token = tl.program_id(0).to(tl.int64)
    offs_e, offs_k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = offs_e < E
    logits = tl.load(logits_TE_ptr + token * stride_logits + offs_e, mask=inside, other=0.0)
    logits = logits.to(tl.float32)
    if SCORING == 0:
        logits = tl.where(inside, logits, float("-inf"))
        terms = tl.exp(logits - tl.max(logits, axis=0))
        scores = terms / tl.sum(terms, axis=0)
    elif SCORING == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = _sqrt_softplus(logits)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_E_ptr + offs_e, mask=inside, other=0.0).to(tl.float32)
    if G > PICKED:
        choice = _in_picked_groups(choice, G, PICKED, BLOCK_E)
    keys = tl.where(inside, _ranked(choice, offs_e), -0x7FFFFFFFFFFFFFFF)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for j in range(TOP_K):
        expert = _index_of(tl.max(keys, axis=0))
        weight = tl.sum(tl.where(offs_e == expert, scores, 0.0), axis=0)
        weights = tl.where(offs_k == j, weight, weights)
        ids = tl.where(offs_k == j, expert, ids)
        keys = tl.where(offs_e == expert, -0x7FFFFFFFFFFFFFFF, keys)
    if NORMALIZES:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    out = token * TOP_K + offs_k
    tl.store(weights_TK_ptr + out, weights * route_scale, mask=offs_k < TOP_K)
    tl.store(ids_TK_ptr + out, ids, mask=offs_k < TOP_K)


@triton.jit
def _moe_router_hash_kernel(
    logits_TE_ptr, token_ids_T_ptr, table_VK_ptr, weights_TK_ptr, ids_TK_ptr,
    stride_logits, T, route_scale,
    BLOCK_T: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """ids = table[token id], weighted by their sqrt-softplus scores. Program: BLOCK_T tokens."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    tokens = offs_t < T
    inside = tokens[:, None] & (offs_k < TOP_K)[None, :]
    at = tl.load(token_ids_T_ptr + offs_t, mask=tokens, other=0).to(tl.int64)
    ids = tl.load(table_VK_ptr + at[:, None] * TOP_K + offs_k[None, :], mask=inside, other=0)
    rows = logits_TE_ptr + offs_t.to(tl.int64)[:, None] * stride_logits
    logits = tl.load(rows + ids, mask=inside, other=0.0).to(tl.float32)
    weights = tl.where(inside, _sqrt_softplus(logits), 0.0)
    if NORMALIZES:
        weights = weights / (tl.sum(weights, axis=1)[:, None] + 1e-20)
    out = offs_t.to(tl.int64)[:, None] * TOP_K + offs_k[None, :]
    tl.store(weights_TK_ptr + out, weights * route_scale, mask=inside)
    tl.store(ids_TK_ptr + out, ids.to(tl.int32), mask=inside)
