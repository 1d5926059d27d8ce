"""Compression of blocks of rows by an MLP in Triton: hidden values of entries, then the entries.

An item is one entry of one cached head that a step may complete: E of each sequence and head, in
the order sequence, entry, head. So a tile has the items of a prompt, or those of many decodes, and
reads the weights once for all of them. A launch is of the items from first_item on: hidden_IH has
no others.

Suffixes of tensor names: N blocks of a cache, P rows in a block, K cached heads, D values of a row,
B sequences, W columns of a block table, L values of a block of rows, I items, H hidden values.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _complete(tokens, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Entries whose rows are all among the first tokens."""
    return tl.maximum(tokens - LENGTH + STRIDE, 0) // STRIDE


@triton.jit
def _items_of_tile(
    first, starts_B_ptr, lengths_B_ptr, num_items, num_entries,
    KV_HEADS: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Number, sequence, cached head and entry of each item of a tile, and whether the step
    completes it: of a sequence with fewer new tokens than another, some are none."""
    item = first + tl.arange(0, BLOCK_I)
    inside = item < num_items
    sequence = item // (num_entries * KV_HEADS)
    start = tl.load(starts_B_ptr + sequence, mask=inside, other=0)
    new = tl.load(starts_B_ptr + sequence + 1, mask=inside, other=0) - start
    length = tl.load(lengths_B_ptr + sequence, mask=inside, other=0)
    entry = _complete(length - new, LENGTH, STRIDE) + item // KV_HEADS % num_entries
    is_new = inside & (entry < _complete(length, LENGTH, STRIDE))
    return item, sequence.to(tl.int64), item % KV_HEADS, entry, is_new


@triton.jit
def _nsa_hidden_kernel(
    rows_NPKD_ptr, w1_HL_ptr, b1_H_ptr, hidden_IH_ptr, starts_B_ptr, lengths_B_ptr, table_BW_ptr,
    first_item, num_items, num_entries, H, stride_table, stride_page, stride_row, stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile of items, tile of hidden values): silu(w1 @ rows + b1), where b1 has the
    product with the position encoding in it, which is the same for every block. One step
    multiplies BLOCK_D values of the rows at one offset; it finds each row by its block table."""
    item, sequence, head, entry, is_new = _items_of_tile(
        first_item + tl.program_id(0) * BLOCK_I, starts_B_ptr, lengths_B_ptr,
        num_items, num_entries, KV_HEADS, LENGTH, STRIDE, BLOCK_I,
    )  # fmt: skip
    if tl.max(is_new.to(tl.int32), axis=0) == 0:
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside_h = offs_h < H
    table = table_BW_ptr + sequence * stride_table
    rows_ptr = rows_NPKD_ptr + head.to(tl.int64) * stride_head
    w1_ptr = w1_HL_ptr + offs_h.to(tl.int64)[:, None] * (LENGTH * HEAD_DIM)
    chunks: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    acc = tl.zeros((BLOCK_I, BLOCK_H), dtype=tl.float32)
    for step in range(LENGTH * chunks):
        offset = step // chunks
        offs_d = step % chunks * BLOCK_D + tl.arange(0, BLOCK_D)
        inside_d = (offs_d < HEAD_DIM)[None, :]
        position = entry * STRIDE + offset
        page = tl.load(table + position // PAGE, mask=is_new, other=0).to(tl.int64)
        row_ptr = rows_ptr + page * stride_page + (position % PAGE) * stride_row
        x = tl.load(row_ptr[:, None] + offs_d[None, :], mask=is_new[:, None] & inside_d, other=0.0)
        w = tl.load(
            w1_ptr + (offset * HEAD_DIM + offs_d)[None, :],
            mask=inside_h[:, None] & inside_d,
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(w), acc)
    acc += tl.load(b1_H_ptr + offs_h, mask=inside_h, other=0.0)[None, :]
    y = acc * tl.sigmoid(acc)
    out_ptrs = hidden_IH_ptr + (item - first_item).to(tl.int64)[:, None] * H + offs_h[None, :]
    tl.store(
        out_ptrs, y.to(hidden_IH_ptr.dtype.element_ty), mask=is_new[:, None] & inside_h[None, :]
    )


@triton.jit
def _nsa_project_kernel(
    hidden_IH_ptr, w2_DH_ptr, b2_D_ptr, entries_NPKD_ptr, starts_B_ptr, lengths_B_ptr,
    table_BW_ptr, first_item, num_items, num_entries, H, stride_table, stride_page, stride_row,
    stride_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile of items, tile of an entry's values): w2 @ hidden + b2 into the entry's slot,
    which its block table says."""
    item, sequence, head, entry, is_new = _items_of_tile(
        first_item + tl.program_id(0) * BLOCK_I, starts_B_ptr, lengths_B_ptr,
        num_items, num_entries, KV_HEADS, LENGTH, STRIDE, BLOCK_I,
    )  # fmt: skip
    if tl.max(is_new.to(tl.int32), axis=0) == 0:
        return
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside_d = offs_d < HEAD_DIM
    x_ptr = hidden_IH_ptr + (item - first_item).to(tl.int64)[:, None] * H
    w_ptr = w2_DH_ptr + offs_d.to(tl.int64)[:, None] * H
    acc = tl.zeros((BLOCK_I, BLOCK_D), dtype=tl.float32)
    for first in range(0, H, BLOCK_H):
        offs_h = (first + tl.arange(0, BLOCK_H))[None, :]
        inside_h = offs_h < H
        x = tl.load(x_ptr + offs_h, mask=is_new[:, None] & inside_h, other=0.0)
        w = tl.load(w_ptr + offs_h, mask=inside_d[:, None] & inside_h, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    acc += tl.load(b2_D_ptr + offs_d, mask=inside_d, other=0.0)[None, :]
    page = tl.load(table_BW_ptr + sequence * stride_table + entry // PAGE, mask=is_new, other=0)
    slot = page.to(tl.int64) * stride_page + (entry % PAGE) * stride_row
    slot += head.to(tl.int64) * stride_head
    tl.store(
        entries_NPKD_ptr + slot[:, None] + offs_d[None, :],
        acc.to(entries_NPKD_ptr.dtype.element_ty),
        mask=is_new[:, None] & inside_d[None, :],
    )
