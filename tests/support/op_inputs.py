"""Random inputs of ops, and paged caches on which reading an unused place is seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, settings

from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.formats import torch_dtype
from hal.ops.kv_formats import KV_FORMATS, slots_of, write_rows

# For tests of drawn inputs: a busy machine is no failure.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NO_BLOCK = 10**6  # in the table where there is no block: looking it up is an IndexError


def normal(rng: torch.Generator, *shape: int, dtype: str = "float64") -> torch.Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64).to(torch_dtype(dtype))


def assert_within(op: str, got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    """`want` in float64; the tolerance is the catalogue's for the dtype of `got`, times `scale`."""
    tolerance = CATALOGUE[op].tolerances[str(got.dtype).removeprefix("torch.")]
    assert got.shape == want.shape
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance.rtol * scale, atol=tolerance.atol * scale
    )


def paged(
    rng: torch.Generator,
    name: str,
    sequences: Sequence[torch.Tensor],
    block_size: int,
    *,
    dtype: str = "float64",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache, block_table) of rows [S, dim] per sequence, on shuffled blocks of a format.

    dtype: of a cache of plain rows. Unused places are NaN.
    """
    blocks = [-(-len(rows) // block_size) for rows in sequences]
    free = torch.randperm(sum(blocks) + 3, generator=rng)
    table = torch.full((len(sequences), max([1, *blocks])), NO_BLOCK, dtype=torch.int32)
    dim = sequences[0].shape[1]
    cache = torch.full((len(free), block_size, dim), float("nan"), dtype=torch_dtype(dtype))
    if not KV_FORMATS[name].is_plain:
        page = KV_FORMATS[name].page_bytes(block_size)
        cache = torch.full((len(free), page), 255, dtype=torch.uint8)
    used = 0
    for i, rows in enumerate(sequences):
        table[i, : blocks[i]] = free[used : used + blocks[i]].int()
        used += blocks[i]
        slots = slots_of(table[i], torch.arange(len(rows)), block_size)
        write_rows(name, cache, block_size, slots, rows)
    return cache, table


def metadata(lengths: Sequence[tuple[int, int]], table: torch.Tensor) -> AttentionMetadata:
    """Of (query_len, seq_len) sequences."""
    return AttentionMetadata(
        query_start_loc=starts_of([q for q, _ in lengths]),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32),
        block_table=table,
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )


def starts_of(counts: Sequence[int]) -> torch.Tensor:
    """int32 [B + 1] of the counts."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()


def random_lists(
    rng: torch.Generator, lengths: Sequence[tuple[int, int]], top_k: int
) -> torch.Tensor:
    """int32 [T, top_k] of distinct positions of the query's sequence, visible or not, with padding
    in random places; some queries have nothing but padding."""
    rows = []
    for queries, seq_len in lengths:
        for _ in range(queries):
            row = torch.randperm(max(seq_len, top_k), generator=rng)[:top_k].int()
            is_padding = torch.rand(top_k, generator=rng) < torch.rand(1, generator=rng)
            rows.append(torch.where(is_padding | (row >= seq_len), -1, row))
    return torch.stack(rows).int()
