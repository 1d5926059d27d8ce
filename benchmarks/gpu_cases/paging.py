"""Paged caches with shuffled pages on the device of a run."""

from __future__ import annotations

import torch

from gpu_cases.case import Bench
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import KV_FORMATS, slots_of, write_rows

PAGE = 16  # rows of a page


def page_table(bench: Bench, sequences: int, rows: int, page: int = PAGE) -> torch.Tensor:
    """int32 [sequences, pages]: every page of a cache once, in any order."""
    pages = -(-rows // page)
    order = torch.randperm(sequences * pages, device=bench.device)
    return order.view(sequences, pages).int()


def paged_heads(
    bench: Bench, table: torch.Tensor, kv_heads: int, dim: int, page: int = PAGE
) -> torch.Tensor:
    """A cache [pages, page, heads, dim] of random rows."""
    return bench.bf16(table.numel(), page, kv_heads, dim)


def paged_rows(
    bench: Bench, name: str, table: torch.Tensor, rows: int, dim: int, page: int = PAGE
) -> torch.Tensor:
    """A cache of random rows in a format of `hal.ops.kv_formats`."""
    if name == "bf16":
        return bench.bf16(table.numel(), page, dim)
    cache = torch.zeros(
        (table.numel(), KV_FORMATS[name].page_bytes(page)), dtype=torch.uint8, device=bench.device
    )
    places = torch.arange(rows, device=bench.device)
    for pages in table:
        slots = slots_of(pages, places, page)
        write_rows(name, cache, page, slots, bench.randn(rows, dim))
    return cache


def starts_of(bench: Bench, counts: list[int]) -> torch.Tensor:
    """int32 [B + 1] of the counts."""
    return bench.on(torch.tensor([0, *counts]).cumsum(0).int())


def metadata(
    bench: Bench, table: torch.Tensor, context: int, new: int, sequences: int
) -> AttentionMetadata:
    """Of sequences that are all alike: so many new tokens of so many."""
    return AttentionMetadata(
        query_start_loc=starts_of(bench, [new] * sequences),
        seq_lens=torch.full((sequences,), context, dtype=torch.int32, device=bench.device),
        block_table=table,
        max_query_len=new,
        max_seq_len=context,
    )


def lists_of(bench: Bench, tokens: int, entries: int, top_k: int) -> torch.Tensor:
    """int32 [tokens, top_k] of distinct entries, an eighth of the places padded."""
    scores = torch.rand(tokens, entries, device=bench.device)
    lists = torch.full((tokens, top_k), -1, dtype=torch.int32, device=bench.device)
    chosen = scores.topk(min(top_k, entries), dim=1).indices.int()
    lists[:, : chosen.shape[1]] = chosen
    return lists.masked_fill(torch.rand(tokens, top_k, device=bench.device) < 0.125, -1)
