"""Attention of a prompt over listed blocks of a paged KV cache in Triton.

Suffixes of tensor names: T query rows, D heads side by side, N blocks of the cache, P positions in
a block, K cached heads, B sequences, W columns of the block table, L lists, S places of a list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hal_kernels.block_sparse_attention.grouped_rows import (
    attend_steps,
    load_rows,
    normalised,
    rows_of_tile,
)


@triton.jit
def _last_place(list_ptr, PLACES: tl.constexpr, BLOCK_S: tl.constexpr):
    """Places of a list up to its last block: what is behind it is padding."""
    offs = tl.arange(0, BLOCK_S)
    blocks = tl.load(list_ptr + offs, mask=offs < PLACES, other=-1)
    return tl.max(tl.where(blocks >= 0, offs + 1, 0), axis=0)


@triton.jit
def _block_sparse_attention_kernel(
    q_TD_ptr, k_NPKD_ptr, v_NPKD_ptr, lists_LKS_ptr, out_TD_ptr,
    starts_B_ptr, lengths_B_ptr, table_BW_ptr, list_starts_B_ptr,
    scale, window, num_kv_heads, stride_q, stride_out, stride_table,
    stride_k_page, stride_k_row, stride_k_head, stride_v_page, stride_v_row, stride_v_head,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_G: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, PLACES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_Q queries, cached head, sequence). A tile lies in one block of
    queries, a step of BLOCK_N keys in one of keys."""
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts_B_ptr + sequence)
    queries = tl.load(starts_B_ptr + sequence + 1) - start
    first = tile * BLOCK_Q
    if first >= queries:
        return
    context = tl.load(lengths_B_ptr + sequence) - queries
    query, head, rows = rows_of_tile(first, queries, kv_head, GROUP, BLOCK_Q, BLOCK_G)
    token = (start + query).to(tl.int64)
    q = load_rows(q_TD_ptr, token, head, rows, stride_q, HEAD_DIM, BLOCK_D)
    at = context + query
    last = context + tl.minimum(first + BLOCK_Q, queries) - 1
    table = table_BW_ptr + sequence.to(tl.int64) * stride_table
    k_head = k_NPKD_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head = v_NPKD_ptr + kv_head.to(tl.int64) * stride_v_head
    number = (tl.load(list_starts_B_ptr + sequence) + first // QUERY_BLOCK).to(tl.int64)
    places = lists_LKS_ptr + (number * num_kv_heads + kv_head) * PLACES
    listed = _last_place(places, PLACES, BLOCK_S) * KEY_BLOCK // BLOCK_N
    nearest = tl.maximum(0, context + first - window + 1)
    near = tl.where(window > 0, tl.cdiv(last + 1 - nearest, BLOCK_N), 0)
    acc, _, total = attend_steps(
        q, k_head, v_head, table, places, at, rows, last, nearest, listed, 0, listed + near,
        window, scale, stride_k_page, stride_k_row, stride_v_page, stride_v_row,
        KEY_BLOCK, BLOCK_N, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, PAGE,
    )  # fmt: skip
    offs = tl.arange(0, BLOCK_DV)
    out = normalised(acc, total).to(out_TD_ptr.dtype.element_ty)
    out_ptrs = out_TD_ptr + token[:, None] * stride_out + head[:, None] * V_HEAD_DIM + offs[None, :]
    tl.store(out_ptrs, out, mask=rows[:, None] & (offs < V_HEAD_DIM)[None, :])
