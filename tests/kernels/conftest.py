"""Paged attention cases and their float64 result."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hal.ops.attention import AttentionMetadata


@pytest.fixture(scope="session")
def attention_cases() -> SimpleNamespace:
    """paged(...) makes random inputs, exact(...) the float64 result."""
    return SimpleNamespace(paged=_paged_case, exact=_exact_attention)


def _paged_case(
    seq_lens: list[int],
    query_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Random q (row-strided), caches with shuffled blocks, NaN wherever no token was written."""
    num_heads, num_kv_heads = heads
    kv_dtype = kv_dtype or dtype
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 2
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache = torch.full(shape, math.nan, dtype=kv_dtype)
    v_cache = torch.full(shape, math.nan, dtype=kv_dtype)
    free = torch.randperm(num_blocks).tolist()
    table = torch.full((len(seq_lens), max(needed) + 2), -1, dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        for column in range(needed[row]):
            block = free.pop()
            table[row, column] = block
            filled = min(block_size, length - column * block_size)
            k_cache[block, :filled] = torch.randn(filled, num_kv_heads, head_dim).to(kv_dtype)
            v_cache[block, :filled] = torch.randn(filled, num_kv_heads, head_dim).to(kv_dtype)
    tokens, width = sum(query_lens), num_heads * head_dim
    q = torch.randn(tokens, width + 48).to(dtype)[:, 16 : 16 + width]
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    meta = AttentionMetadata(starts, lens, table, max(query_lens), max(seq_lens))
    return q, k_cache, v_cache, meta


def _exact_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float64 attention, one query at a time, with only the keys it may see."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // head_dim // num_kv_heads
    starts = meta.query_start_loc.tolist()
    rows = []
    for index, length in enumerate(meta.seq_lens.tolist()):
        blocks = meta.block_table[index, : -(-length // block_size)].long()
        keys = k_cache[blocks].reshape(-1, num_kv_heads, head_dim).double()
        values = v_cache[blocks].reshape(-1, num_kv_heads, head_dim).double()
        count = starts[index + 1] - starts[index]
        for i in range(count):
            position = length - count + i
            first = max(0, position + 1 - window) if window else 0
            seen_k = keys[first : position + 1].repeat_interleave(group, dim=1)
            seen_v = values[first : position + 1].repeat_interleave(group, dim=1)
            query = q[starts[index] + i].double().view(-1, head_dim)
            scores = torch.einsum("hd,khd->hk", query, seen_k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : seen_k.shape[0]]
            rows.append(torch.einsum("hk,khd->hd", weights, seen_v).flatten())
    return torch.stack(rows)
