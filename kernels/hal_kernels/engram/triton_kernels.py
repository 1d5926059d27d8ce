"""Engram in Triton: rows of a table gathered by n-gram hash, and their mix into the streams.

Suffixes of tensor names: T tokens, S ids of a token (its own first), G n-grams (of 2 ids and more),
H heads, R rows of the table, B bytes of a row, N streams, D hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _engram_gather_kernel(
    ids_TS_ptr, multipliers_S_ptr, primes_GH_ptr, offsets_GH_ptr, table_RB_ptr, y_ptr, R,
    S: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program (token, n-gram): the rows of all heads as y[t, n-gram, head, WIDTH].

    A row is WIDTH e4m3 values, then one ue8m0 scale per 32. They are decoded in integers, so that
    it is the same where the instruction set has no FP8. A row that the table lacks reads as NaN.
    """
    token, gram = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_h, offs_w = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_W)
    heads, inside = offs_h < H, (offs_h < H)[:, None] & (offs_w < WIDTH)[None, :]
    mixed = tl.load(ids_TS_ptr + token * S) * tl.load(multipliers_S_ptr)
    for s in range(1, gram + 2):
        mixed = mixed ^ (tl.load(ids_TS_ptr + token * S + s) * tl.load(multipliers_S_ptr + s))
    prime = tl.load(primes_GH_ptr + gram * H + offs_h, mask=heads, other=1)
    rest = mixed % prime
    # The remainder has the sign of the prime, as Python's.
    rest += tl.where(rest < 0, prime, 0)
    row = rest + tl.load(offsets_GH_ptr + gram * H + offs_h, mask=heads, other=0)
    stored = inside & ((row >= 0) & (row < R))[:, None]
    bytes_ptr = table_RB_ptr + row[:, None] * (WIDTH + WIDTH // 32)
    code = tl.load(bytes_ptr + offs_w[None, :], mask=stored, other=0x7F).to(tl.int32)
    size = code & 0x7F
    wide = (size.to(tl.int32) << 20) + 0x3C000000
    small = size.to(tl.float32) * 0.001953125
    value = tl.where(size < 8, small, wide.to(tl.float32, bitcast=True))
    value = tl.where(size == 0x7F, float("nan"), tl.where(code >= 0x80, -value, value))
    power = tl.load(bytes_ptr + WIDTH + (offs_w // 32)[None, :], mask=stored, other=127)
    power = power.to(tl.int32)
    bits = tl.where(power == 0, 0x400000, power << 23)  # 2**-127 is a denormal
    scale = tl.where(power == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    out = ((token * (S - 1) + gram) * H + offs_h)[:, None] * WIDTH + offs_w[None, :]
    tl.store(y_ptr + out, (value * scale).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _engram_mix_kernel(
    streams_TND_ptr, kv_TMD_ptr, query_weight_ND_ptr, key_weight_ND_ptr, out_TND_ptr,
    stride_streams, stride_kv, D, root, eps, N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, stream h): out = stream + gate * value, gate = sigmoid(sign(d) sqrt(|d|)) of
    d = <norm(stream), norm(key h)> * root. kv: N keys, then the value. What is read again is still
    in the cache."""
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK_D)
    stream = streams_TND_ptr + token * stride_streams + h * D
    key = kv_TMD_ptr + token * stride_kv + h * D
    value = kv_TMD_ptr + token * stride_kv + N * D
    q_squares = tl.zeros((BLOCK_D,), dtype=tl.float32)
    k_squares = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = start + offs < D
        q = tl.load(stream + start + offs, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(key + start + offs, mask=inside, other=0.0).to(tl.float32)
        q_squares += q * q
        k_squares += k * k
    q_rms = 1.0 / tl.sqrt(tl.sum(q_squares, axis=0) / D + eps)
    k_rms = 1.0 / tl.sqrt(tl.sum(k_squares, axis=0) / D + eps)
    dots = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = start + offs < D
        q = tl.load(stream + start + offs, mask=inside, other=0.0).to(tl.float32) * q_rms
        k = tl.load(key + start + offs, mask=inside, other=0.0).to(tl.float32) * k_rms
        at = h * D + start + offs
        q *= tl.load(query_weight_ND_ptr + at, mask=inside, other=0.0).to(tl.float32)
        k *= tl.load(key_weight_ND_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dots += q * k
    score = tl.sum(dots, axis=0) * root
    root_of = tl.sqrt(tl.abs(score))
    gate = 1.0 / (1.0 + tl.exp(tl.where(score < 0.0, root_of, -root_of)))
    out = out_TND_ptr + (token * N + h) * D
    for start in range(0, D, BLOCK_D):
        inside = start + offs < D
        q = tl.load(stream + start + offs, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(value + start + offs, mask=inside, other=0.0).to(tl.float32)
        y = q + gate * v
        tl.store(out + start + offs, y.to(out_TND_ptr.dtype.element_ty), mask=inside)
