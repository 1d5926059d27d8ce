"""Paged caches of rows in any format, with shuffled pages and NaN wherever nothing was written."""

from __future__ import annotations

import math

import torch

from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import KV_FORMATS, slots_of, write_rows


def paged_rows(
    name: str, lengths: list[int], dim: int, block_size: int, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block table) of random rows for sequences of these lengths.

    A byte of 0xFF is NaN as a value of eight bits and in every scale.
    """
    needed = [-(-length // block_size) for length in lengths]
    pages = sum(needed) + 2
    if KV_FORMATS[name].is_plain:
        dtype = getattr(torch, KV_FORMATS[name].element)
        cache = torch.full((pages, block_size, dim), math.nan, dtype=dtype)
    else:
        size = KV_FORMATS[name].page_bytes(block_size)
        cache = torch.full((pages, size), 0xFF, dtype=torch.uint8)
    free = torch.randperm(pages).tolist()
    table = torch.full((len(lengths), max(needed, default=0) + 2), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        table[row, : needed[row]] = torch.tensor([free.pop() for _ in range(needed[row])])
        if not length:
            continue
        slots = slots_of(table[row], torch.arange(length), block_size)
        write_rows(name, cache, block_size, slots, torch.randn(length, dim) * magnitude)
    return cache, table


def metadata(lengths: list[tuple[int, int]], table: torch.Tensor) -> AttentionMetadata:
    """Of (context with the new tokens, new tokens) for each sequence."""
    new = [0, *(count for _, count in lengths)]
    starts = torch.tensor(new).cumsum(0).to(torch.int32)
    lens = torch.tensor([length for length, _ in lengths], dtype=torch.int32)
    return AttentionMetadata(starts, lens, table, max(new), max(n for n, _ in lengths))


def index_lists(lengths: list[tuple[int, int]], top_k: int, ratio: int = 1) -> torch.Tensor:
    """Lists int32 [tokens, top_k] of entries that each query sees and of some that it does not,
    shuffled with padding between."""
    rows = []
    for length, new in lengths:
        for _ in range(new):
            row = torch.full((top_k,), -1, dtype=torch.int32)
            chosen = torch.randperm(length // ratio)[:top_k].to(torch.int32)
            row[: len(chosen)] = chosen
            row[torch.randperm(top_k)[: top_k // 8]] = -1
            rows.append(row[torch.randperm(top_k)])
    return torch.stack(rows) if rows else torch.empty((0, top_k), dtype=torch.int32)
