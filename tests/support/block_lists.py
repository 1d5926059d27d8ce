"""Lists of key blocks with padding, their metadata, and caches of heads in shuffled pages."""

from __future__ import annotations

import math

import torch

from hal.ops.block_sparse_attention import BlockSparseMetadata


def paged_heads(
    lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache [N, P, K, D], block table) of random rows for sequences of these lengths; NaN where
    nothing was written, and a table that names no page where there is none."""
    needed = [-(-length // block_size) for length in lengths]
    pages = sum(needed) + 2
    cache = torch.full((pages, block_size, kv_heads, dim), math.nan, dtype=dtype)
    return cache, fill_pages(cache, lengths, torch.randperm(pages).tolist())


def fill_pages(cache: torch.Tensor, lengths: list[int], free: list[int]) -> torch.Tensor:
    """The table of random rows that are written to the free pages, which are used up."""
    size = cache.shape[1]
    most = max((-(-length // size) for length in lengths), default=0)
    table = torch.full((len(lengths), most + 2), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(-(-length // size)):
            page = free.pop()
            table[row, column] = page
            filled = min(size, length - column * size)
            cache[page, :filled] = torch.randn(filled, *cache.shape[2:]).to(cache.dtype)
    return table


def starts_of(counts: list[int]) -> torch.Tensor:
    """int32 [B + 1] of the counts."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def list_metadata(
    lengths: list[tuple[int, int]], table: torch.Tensor, query_block: int
) -> BlockSparseMetadata:
    """Of (context with the new tokens, new tokens) for each sequence."""
    return BlockSparseMetadata(
        query_start_loc=starts_of([new for _, new in lengths]),
        seq_lens=torch.tensor([length for length, _ in lengths], dtype=torch.int32),
        block_table=table,
        list_start_loc=starts_of([-(-new // query_block) for _, new in lengths]),
        max_query_len=max((new for _, new in lengths), default=0),
        max_seq_len=max((length for length, _ in lengths), default=0),
    )


def random_lists(
    lengths: list[tuple[int, int]], kv_heads: int, places: int, query_block: int, key_block: int
) -> torch.Tensor:
    """int32 [lists, K, places] of distinct blocks, seen or not, with padding between; some lists
    are nothing but padding."""
    lists = []
    for length, new in lengths:
        for _ in range(-(-new // query_block) * kv_heads):
            row = torch.full((places,), -1, dtype=torch.int32)
            chosen = torch.randperm(-(-length // key_block) + 1)[:places].to(torch.int32)
            row[: len(chosen)] = chosen
            row[torch.rand(places) < torch.rand(1)] = -1
            lists.append(row[torch.randperm(places)])
    if not lists:
        return torch.empty((0, kv_heads, places), dtype=torch.int32)
    return torch.stack(lists).view(-1, kv_heads, places)
