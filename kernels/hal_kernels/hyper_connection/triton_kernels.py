"""Hyper-connections in Triton: the projection of all streams, their weights and the collapse, and
the streams after a sublayer.

Suffixes of tensor names: T tokens, N streams, D hidden size, C = N * D columns of a flattened
token, W weights (mixes) of a token, S parts that the columns are summed in, P terms of a value.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _hyper_connection_mixes_kernel(
    streams_TC_ptr, terms_PWC_ptr, partial_TSW_ptr, stride_streams, T, C, W,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, S: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """partial[t, s, w] = streams[t] @ projection[w] over part s of the columns, and in column W the
    sum of squares. Program (BLOCK_T tokens, part).

    The projection, in float32, comes as three bfloat16 terms (hi, mid, lo) that sum to it, and the
    streams are cut into TERMS terms here (1 for bfloat16, 2 for float16, 3 for float32): the
    matrix unit multiplies them exactly, products below float32's precision are left out. The parts
    are always as many, so a token's result does not depend on the tokens beside it.
    """
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    offs_c, offs_w = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_W)
    tokens, mixes = offs_t < T, offs_w < W
    rows = streams_TC_ptr + offs_t.to(tl.int64)[:, None] * stride_streams
    acc = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    steps = tl.cdiv(tl.cdiv(C, BLOCK_C), S)
    for step in range(part * steps, (part + 1) * steps):
        at_c = step * BLOCK_C + offs_c
        inside = at_c < C
        x = tl.load(rows + at_c[None, :], mask=tokens[:, None] & inside[None, :], other=0.0)
        rest = x.to(tl.float32)
        squares += rest * rest
        w_ptrs = terms_PWC_ptr + offs_w[:, None] * C + at_c[None, :]
        w_mask = mixes[:, None] & inside[None, :]
        for i in tl.static_range(TERMS):
            term = rest.to(tl.bfloat16)
            rest -= term.to(tl.float32)
            for j in tl.static_range(3 - i):
                w = tl.load(w_ptrs + j * W * C, mask=w_mask, other=0.0)
                acc = tl.dot(term, tl.trans(w), acc)
    out = partial_TSW_ptr + (offs_t.to(tl.int64)[:, None] * S + part) * BLOCK_W + offs_w[None, :]
    total = tl.sum(squares, axis=1)
    tl.store(out, tl.where((offs_w == W)[None, :], total[:, None], acc), mask=tokens[:, None])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mix(
    partial_TSW_ptr, base_W_ptr, scale_ptr, token, rms, kind, first,
    COUNT: tl.constexpr, BLOCK_W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Mixes first to first + COUNT of a token, normed, scaled and shifted."""
    offs_s, offs = tl.arange(0, S), first + tl.arange(0, COUNT)
    parts = partial_TSW_ptr + (token * S + offs_s)[:, None] * BLOCK_W + offs[None, :]
    mixed = tl.sum(tl.load(parts), axis=0) * rms
    return mixed * tl.load(scale_ptr + kind) + tl.load(base_W_ptr + offs)


@triton.jit
def _doubly_stochastic(mixed, eps, N: tl.constexpr, ITERATIONS: tl.constexpr):
    """Sinkhorn's iteration in registers from a softmax of the rows, columns first."""
    terms = tl.exp(mixed - tl.max(mixed, axis=1)[:, None])
    comb = terms / tl.sum(terms, axis=1)[:, None] + eps
    comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
    return comb


@triton.jit
def _hyper_connection_collapse_kernel(
    streams_TC_ptr, partial_TSW_ptr, base_W_ptr, scale_ptr, previous_TN_ptr,
    x_TD_ptr, pre_TN_ptr, post_TN_ptr, comb_TNN_ptr, stride_streams, D, norm_eps, eps,
    N: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, S: tl.constexpr,
    ITERATIONS: tl.constexpr, BLOCK_D: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """One token: its weights from the partial mixes, then x = sum_h pre[h] * streams[h].

    SOURCE of the pre that x is collapsed with: 0 the token's own, 1 `previous`, 2 stream 0 alone.
    W = N * (2 + N) mixes give pre, post and comb; N give pre alone (the head), 0 none at all.
    N is a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, N)
    if W > 0:
        offs_s = tl.arange(0, S)
        squares = tl.sum(tl.load(partial_TSW_ptr + (token * S + offs_s) * BLOCK_W + W), axis=0)
        rms = 1.0 / tl.sqrt(squares / (N * D) + norm_eps)
        mixed = _mix(
            partial_TSW_ptr, base_W_ptr, scale_ptr, token, rms, 0, 0, N, BLOCK_W, S
        )  # fmt: skip
        pre = _sigmoid(mixed) + eps
        if W > N:
            tl.store(pre_TN_ptr + token * N + offs_n, pre)
            mixed = _mix(
                partial_TSW_ptr, base_W_ptr, scale_ptr, token, rms, 1, N, N, BLOCK_W, S
            )  # fmt: skip
            tl.store(post_TN_ptr + token * N + offs_n, 2.0 * _sigmoid(mixed))
            mixed = _mix(
                partial_TSW_ptr, base_W_ptr, scale_ptr, token, rms, 2, 2 * N, N * N, BLOCK_W, S
            )  # fmt: skip
            comb = _doubly_stochastic(tl.reshape(mixed, (N, N)), eps, N, ITERATIONS)
            offs_nn = offs_n[:, None] * N + offs_n[None, :]
            tl.store(comb_TNN_ptr + token * N * N + offs_nn, comb)
    if SOURCE == 1:
        pre = tl.load(previous_TN_ptr + token * N + offs_n).to(tl.float32)
    offs_d = tl.arange(0, BLOCK_D)
    rows = streams_TC_ptr + token * stride_streams
    for start in range(0, D, BLOCK_D):
        at_d = start + offs_d
        inside = at_d < D
        if SOURCE == 2:
            x = tl.load(rows + at_d, mask=inside, other=0.0).to(tl.float32)
        else:
            tile = rows + offs_n[:, None] * D + at_d[None, :]
            values = tl.load(tile, mask=inside[None, :], other=0.0).to(tl.float32)
            x = tl.sum(values * pre[:, None], axis=0)
        tl.store(x_TD_ptr + token * D + at_d, x.to(x_TD_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _hyper_connection_expand_kernel(
    y_TD_ptr, streams_TC_ptr, post_TN_ptr, comb_TNN_ptr, out_TC_ptr,
    stride_y, stride_streams, D, N: tl.constexpr, BLOCK_D: tl.constexpr, RELOADS: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns): out[h] = post[h] * y + sum_j comb[j, h] * streams[j].

    Each stream is a tensor of its own: as rows of one tile they are dealt out to different warps
    where a row has fewer pieces of 16 bytes than the program threads, and their sum goes through
    shared memory.

    RELOADS: the columns of y and of the streams are read anew for each h, after the first from the
    cache of the multiprocessor, and not kept in registers: one sum and what has just been read are
    all that a thread holds.
    """
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = offs_d < D
    y_row = y_TD_ptr + token * stride_y + offs_d
    rows = streams_TC_ptr + token * stride_streams + offs_d
    post, comb = post_TN_ptr + token * N, comb_TNN_ptr + token * N * N
    out = out_TC_ptr + token * N * D + offs_d
    if RELOADS:
        for h in range(N):
            y = tl.load(y_row, mask=inside, other=0.0).to(tl.float32)
            mixed = tl.load(post + h).to(tl.float32) * y
            for j in tl.static_range(N):
                stream = tl.load(rows + j * D, mask=inside, other=0.0).to(tl.float32)
                mixed += tl.load(comb + j * N + h).to(tl.float32) * stream
            tl.store(out + h * D, mixed.to(out_TC_ptr.dtype.element_ty), mask=inside)
    else:
        y = tl.load(y_row, mask=inside, other=0.0).to(tl.float32)
        streams = ()
        for j in tl.static_range(N):
            streams += (tl.load(rows + j * D, mask=inside, other=0.0).to(tl.float32),)
        for h in tl.static_range(N):
            mixed = tl.load(post + h).to(tl.float32) * y
            for j in tl.static_range(N):
                mixed += tl.load(comb + j * N + h).to(tl.float32) * streams[j]
            tl.store(out + h * D, mixed.to(out_TC_ptr.dtype.element_ty), mask=inside)
