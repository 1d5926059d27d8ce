"""Attention over listed blocks: the reference against torch's own attention with a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hal.errors import RequestError
from hal.ops.block_sparse_attention import (
    BlockSparseAttentionRequest,
    BlockSparseMetadata,
    bytes_moved,
    flops,
    pairs,
    reference,
)
from op_inputs import assert_within, normal, paged, starts_of

REQUEST = BlockSparseAttentionRequest(
    phase="prefill",
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=6,
    query_block=4,
    key_block=3,
    num_selected=5,
    block_size=4,
    dtype="float64",
)


def lists_of(rng: torch.Generator, lengths: list[tuple[int, int]], block: int) -> torch.Tensor:
    """Distinct blocks, some behind the query, with padding between."""
    rows = []
    for length, new in lengths:
        for _ in range(-(-new // block) * 2):
            row = torch.randperm(-(-length // 3) + 5, generator=rng)[:5].int()
            is_padding = torch.rand(5, generator=rng) < 0.3
            rows.append(torch.where(is_padding, -1, row))
    return torch.stack(rows).view(-1, 2, 5)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("query_block", [1, 4])
def test_against_torchs_attention(rng: torch.Generator, window: int, query_block: int) -> None:
    request = BlockSparseAttentionRequest(
        **{**REQUEST.arguments(), "window": window, "query_block": query_block, "phase": "prefill"}
    )
    lengths = [(9, 9), (7, 0), (20, 6), (1, 1)]
    keys = [normal(rng, n, 16) for n, _ in lengths]
    values = [normal(rng, n, 12) for n, _ in lengths]
    both = [torch.cat(kv, dim=1) for kv in zip(keys, values, strict=True)]
    cache, table = paged(rng, "bf16", both, 4)
    k_cache = cache[..., :16].unflatten(-1, (2, 8))
    v_cache = cache[..., 16:].unflatten(-1, (2, 6))
    lists = lists_of(rng, lengths, query_block)
    starts = starts_of([new for _, new in lengths])
    of_lists = starts_of([-(-new // query_block) for _, new in lengths])
    meta = BlockSparseMetadata(
        starts, torch.tensor([n for n, _ in lengths], dtype=torch.int32), table, of_lists, 9, 20
    )
    q = normal(rng, int(starts[-1]), 32)
    got = reference(request, scale=0.4)(q, k_cache, v_cache, lists, meta)
    for i, (length, new) in enumerate(lengths):
        for row in range(new):
            at = length - new + row
            token = int(starts[i]) + row
            for head in range(4):
                chosen = lists[int(of_lists[i]) + row // query_block, head // 2].tolist()
                seen = [
                    p for p in range(at + 1) if p // 3 in chosen or (window and at - p < window)
                ]
                found = got[token].view(4, 6)[head]
                if not seen:
                    assert not found.any()
                    continue
                want = scaled_dot_product_attention(
                    q[token].view(4, 8)[head][None],
                    keys[i].view(-1, 2, 8)[seen, head // 2],
                    values[i].view(-1, 2, 6)[seen, head // 2],
                    scale=0.4,
                )
                assert_within("block_sparse_attention", found, want[0])


def test_work_is_that_of_the_keys_that_are_seen() -> None:
    # 15 keys of lists: 1 + 2 + ... + 15, then 15 a query.
    assert pairs(REQUEST, 20) == 120 + 5 * 15
    assert flops(REQUEST, 20) == 2 * 4 * 14 * 195
    # Rows once, q and out, and lists of 5 query blocks.
    assert bytes_moved(REQUEST, 20) == (2 * 20 + 4 * 20) * 14 * 8 + 4 * 5 * 2 * 5


def test_requests_that_are_not_consistent() -> None:
    for wrong in ({"num_heads": 3}, {"key_block": 0}, {"window": -1}, {"num_selected": 0}):
        with pytest.raises(RequestError, match="block_sparse_attention request"):
            BlockSparseAttentionRequest(**{**REQUEST.arguments(), **wrong})
