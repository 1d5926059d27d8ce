"""Scores of an FP8 query over keys of four bits (fp4_68) in Triton, on the FP8 matrix unit.

An e2m1 value is an e4m3 value, so the keys need no rounding: a product is taken for each group of
32 values that share a scale, and scaled into the sum. Without such a unit both are widened to
bfloat16, exactly. Suffixes of tensor names: as in `triton_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.index_logits.triton_kernels import _query_tile, scored_entries
from hal_kernels.kv_write.packed_rows import decode_e2m1, decode_ue8m0, fnuz_of_e4m3, pages_of

_GROUP = tl.constexpr(32)
_GROUPS = tl.constexpr(4)  # of a row of 128 values
_ROW_BYTES = tl.constexpr(64)


@triton.jit
def e4m3_of_e2m1(codes):
    """e2m1 codes (0..15, int16) as e4m3fn bits (uint8) of the same value: 0.5 is a denormal in the
    one and none in the other."""
    size = codes & 0x7
    bits = tl.where(size > 1, (size << 2) + 48, size * 48)
    return (bits | ((codes & 0x8) << 4)).to(tl.uint8)


@triton.jit
def _group_of_keys(
    rows_ptr, scales_ptr, inside, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """(values [BLOCK_N, 32] as the unit takes them, scales [BLOCK_N]) of a group of each row."""
    bytes_of = rows_ptr[:, None] + GROUP * (_GROUP // 2) + tl.arange(0, _GROUP // 2)[None, :]
    packed = tl.load(bytes_of, mask=inside[:, None], other=0).to(tl.int16)
    codes = tl.join(packed & 0xF, packed >> 4).reshape(BLOCK_N, _GROUP)
    scale = decode_ue8m0(tl.load(scales_ptr + GROUP, mask=inside, other=127))
    if UNIT == "fn":
        values = e4m3_of_e2m1(codes).to(tl.float8e4nv, bitcast=True)
    elif UNIT == "fnuz":  # the same bits mean half, here and in the query
        values, scale = fnuz_of_e4m3(e4m3_of_e2m1(codes)), scale * 4.0
    else:
        values = decode_e2m1(codes).to(tl.bfloat16)
    return values, scale


@triton.jit
def _index_logits_fp4_kernel(
    q_TD_ptr, weights_TH_ptr, keys_ptr, out_TE_ptr, candidates_TN_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    scale, width, offset, is_whole,
    stride_q, stride_weights, stride_out, stride_candidates, stride_table, stride_page, scale_start,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    PAGE: tl.constexpr, RATIO: tl.constexpr, UNIT: tl.constexpr, IS_LISTED: tl.constexpr,
):  # fmt: skip
    """Program (tile of entries, tile of queries, sequence), as `_index_logits_kernel`. Queries are
    e4m3fn bits. UNIT: "fn" and "fnuz" are the FP8 units, "bf16" widens. The scales of a page begin
    at scale_start."""
    sequence = tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    length = tl.load(lengths_B_ptr + sequence)
    first = tl.program_id(1) * BLOCK_Q
    if first >= queries:
        return
    last = tl.minimum(first + BLOCK_Q, queries)
    context = length - queries
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_TE_ptr + (start + first).to(tl.int64) * stride_out + offs_n
    complete = (context + last) // RATIO
    candidates = candidates_TN_ptr + (start + first).to(tl.int64) * stride_candidates
    entries, inside = scored_entries(candidates, offs_n, offset, complete, width, IS_LISTED)
    if IS_LISTED:
        if tl.max(inside.to(tl.int32), axis=0) == 0:
            return
    elif offset + tl.program_id(0) * BLOCK_N >= complete:
        if is_whole:
            nothing = tl.full((BLOCK_N,), -float("inf"), dtype=tl.float32)
            for _ in range(first, last):
                tl.store(out_ptrs, nothing, mask=offs_n < width)
                out_ptrs += stride_out
        return
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    page, row = pages_of(table, entries, inside, PAGE), entries % PAGE
    rows_ptr = keys_ptr + page * stride_page + row * _ROW_BYTES
    scales_ptr = keys_ptr + page * stride_page + scale_start + row * _GROUPS
    keys, powers = (), ()
    for group in tl.static_range(_GROUPS):
        values, power = _group_of_keys(rows_ptr, scales_ptr, inside, group, BLOCK_N, UNIT)
        keys, powers = keys + (values,), powers + (power,)
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, _GROUP)
    heads = offs_h < HEADS
    q_ptrs = q_TD_ptr + (start + first).to(tl.int64) * stride_q
    q_ptrs += offs_h[:, None] * (_GROUP * _GROUPS) + offs_d[None, :]
    weight_ptrs = weights_TH_ptr + (start + first).to(tl.int64) * stride_weights + offs_h
    for query in range(first, last):
        products = tl.zeros((BLOCK_N, BLOCK_H), dtype=tl.float32)
        for group in tl.static_range(_GROUPS):
            q = _query_tile(q_ptrs + group * _GROUP, heads[:, None], True, UNIT)
            products += tl.dot(keys[group], tl.trans(q)) * powers[group][:, None]
        weights = tl.load(weight_ptrs, mask=heads, other=0.0).to(tl.float32)
        # Of relu and NaN: a comparison keeps it, a maximum would not.
        products = tl.where(products < 0.0, 0.0, products)
        scores = tl.sum(products * weights[None, :], axis=1) * scale
        seen = entries < (context + query + 1) // RATIO
        tl.store(out_ptrs, tl.where(seen, scores, -float("inf")), mask=offs_n < width)
        q_ptrs += stride_q
        weight_ptrs += stride_weights
        out_ptrs += stride_out
