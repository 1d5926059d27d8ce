"""Choice of experts in Triton: a program has several tokens, a token the registers of one warp.

Suffixes of tensor names: T tokens, E experts, K experts of a token, V vocabulary. Scores are in
float32. Of equal scores the lower index wins, and a NaN is larger than everything, as in a stable
descending sort.

A program's scores are [H, T, C]: token t's expert h * C + c. C are as many as the lanes of a warp
load in 16 bytes each, so that tokens fall to warps and experts to the lanes of one: nothing that is
asked of a token's experts leaves its warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(-0x80000000)  # orders below every score


@triton.jit
def _ordered(score):
    """int32 that orders as the score does: NVIDIA's redux finds the largest of a warp's in one
    instruction. Of the equal ones the lowest index is found apart."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # minus zero becomes zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score == score, ordered, 0x7FC00000)


@triton.jit
def _most(x_HTC):
    """The maximum of each token, [1, T, 1]."""
    return tl.max(tl.max(x_HTC, axis=0), axis=1)[None, :, None]


@triton.jit
def _least(x_HTC):
    return tl.min(tl.min(x_HTC, axis=0), axis=1)[None, :, None]


@triton.jit
def _sum(x_HTC):
    return tl.sum(tl.sum(x_HTC, axis=0), axis=1)[None, :, None]


@triton.jit
def _sqrt_softplus(x):
    """sqrt(log(1 + exp(x))), to float32's precision where exp(x) vanishes beside 1."""
    small = tl.exp(-tl.abs(x))
    near = 1.0 + small
    # What rounding took from 1 + small is given back by the ratio.
    log = tl.where(near == 1.0, small, tl.log(near) * (small / (near - 1.0)))
    return tl.sqrt(tl.maximum(x, 0.0) + tl.where(x == x, log, x))


@triton.jit
def _in_picked_groups(
    choice, G: tl.constexpr, PICKED: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """choice [H, T, C] with -inf outside the PICKED groups with the largest sum of their two best.

    As [A, B, T, D, S]: group a * D + d has experts in all of b and s.
    """
    A: tl.constexpr = min(G, H)
    D: tl.constexpr = G // A
    B: tl.constexpr = H // A
    S: tl.constexpr = C // D
    grouped = tl.reshape(choice, (A, B, T, D, S))
    offs_b, offs_s = tl.arange(0, B)[:, None], tl.arange(0, S)[None, :]
    within = tl.reshape(offs_b * S + offs_s, (1, B, 1, 1, S))
    best = tl.max(tl.max(grouped, axis=1), axis=3)
    at = tl.where(grouped == best[:, None, :, :, None], within, B * S)
    first = tl.min(tl.min(at, axis=1), axis=3)
    rest = tl.where(within == first[:, None, :, :, None], float("-inf"), grouped)
    second = tl.max(tl.max(rest, axis=1), axis=3)
    is_nan = (grouped != grouped).to(tl.int32)
    has_nan = tl.max(tl.max(is_nan, axis=1), axis=3) > 0
    keys = _ordered(tl.where(has_nan, float("nan"), best + second))
    offs_g = (tl.arange(0, A)[:, None] * D + tl.arange(0, D)[None, :])[:, None, :]
    for _ in range(PICKED):
        group = _least(tl.where(keys == _most(keys), offs_g, G))
        keys = tl.where(offs_g == group, _NONE, keys)
    is_picked = (keys == _NONE)[:, None, :, :, None]
    return tl.reshape(tl.where(is_picked, grouped, float("-inf")), (H, T, C))


@triton.jit
def _moe_router_kernel(
    logits_TE_ptr, bias_E_ptr, weights_TK_ptr, ids_TK_ptr, stride_logits, tokens, E, top_k,
    route_scale, T: tl.constexpr, H: tl.constexpr, C: tl.constexpr, SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZES: tl.constexpr, G: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """weights, ids = the TOP_K experts of a token by falling score (+ bias in the choice only).

    SCORING: 0 softmax, 1 sigmoid, 2 sqrt-softplus. H * C: at least E, equal to it if G > PICKED
    (then also G is a power of two). C is at least TOP_K.
    """
    offs_t = tl.program_id(0) * T + tl.arange(0, T)[None, :, None]
    offs_c = tl.arange(0, C)[None, None, :]
    offs_e = tl.arange(0, H)[:, None, None] * C + offs_c
    inside = offs_e < E
    rows = logits_TE_ptr + offs_t.to(tl.int64) * stride_logits
    logits = tl.load(rows + offs_e, mask=inside & (offs_t < tokens), other=0.0).to(tl.float32)
    if SCORING == 0:
        logits = tl.where(inside, logits, float("-inf"))
        terms = tl.exp(logits - _most(logits))
        scores = terms / _sum(terms)
    elif SCORING == 1:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = _sqrt_softplus(logits)
    choice = scores
    if HAS_BIAS:
        # As wide as the logits, or the compiler deals the experts out to warps in another way.
        everywhere = tl.broadcast_to(offs_e, (H, T, C))
        choice += tl.load(bias_E_ptr + everywhere, mask=everywhere < E, other=0.0).to(tl.float32)
    if G > PICKED:
        choice = _in_picked_groups(choice, G, PICKED, H, T, C)
    keys = tl.where(inside, _ordered(choice), _NONE)
    # Begun with values of the tile, which are not written: the compiler deals them out as the tile.
    weights, ids = tl.max(scores, axis=0)[None, :, :], tl.max(keys, axis=0)[None, :, :]
    for j in range(top_k):
        best = _most(keys)
        expert = _least(tl.where(keys == best, offs_e, H * C))
        bits = tl.where(offs_e == expert, scores.to(tl.int32, bitcast=True), 0)
        weights = tl.where(offs_c == j, _sum(bits).to(tl.float32, bitcast=True), weights)
        ids = tl.where(offs_c == j, expert, ids)
        keys = tl.where(offs_e == expert, _NONE, keys)
    if NORMALIZES:
        weights = weights / (_sum(tl.where(offs_c < top_k, weights, 0.0)) + 1e-20)
    out = offs_t.to(tl.int64) * top_k + offs_c
    is_written = (offs_c < top_k) & (offs_t < tokens)
    tl.store(weights_TK_ptr + out, weights * route_scale, mask=is_written)
    tl.store(ids_TK_ptr + out, ids, mask=is_written)


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
