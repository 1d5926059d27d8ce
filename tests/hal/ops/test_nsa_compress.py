"""Compression of blocks: the reference against an MLP of torch's modules over unfolded keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from hal.errors import RequestError
from hal.ops.nsa_attention import NsaMetadata
from hal.ops.nsa_compress import (
    NsaCompressRequest,
    NsaCompressWeights,
    bytes_moved,
    flops,
    reference,
    stored_bytes,
)
from op_inputs import assert_within, normal, paged, starts_of

KEYS = NsaCompressRequest(
    num_kv_heads=4, head_dim=192, hidden_size=512, block_size=64, dtype="bfloat16"
)


def request_of(**fields: Any) -> NsaCompressRequest:
    defaults: dict[str, Any] = {
        "num_kv_heads": 2,
        "head_dim": 5,
        "hidden_size": 7,
        "block_size": 4,
        "dtype": "float64",
        "compress_length": 6,
        "compress_stride": 2,
    }
    return NsaCompressRequest(**(defaults | fields))


def module_of(
    rng: torch.Generator, request: NsaCompressRequest
) -> tuple[nn.Sequential, NsaCompressWeights]:
    width = request.compress_length * request.head_dim
    module = nn.Sequential(
        nn.Linear(width, request.hidden_size),
        nn.SiLU(),
        nn.Linear(request.hidden_size, request.head_dim),
    ).double()
    position = normal(rng, request.compress_length, request.head_dim)
    return module, NsaCompressWeights(
        w1=module[0].weight.detach(),
        w2=module[2].weight.detach(),
        position=position,
        b1=module[0].bias.detach(),
        b2=module[2].bias.detach(),
    )


@pytest.mark.parametrize("fields", [{}, {"compress_length": 2}, {"compress_stride": 3}], ids=str)
def test_entries_are_those_of_the_module(rng: torch.Generator, fields: dict[str, int]) -> None:
    request = request_of(**fields)
    module, weights = module_of(rng, request)
    lengths, new = [17, 3, 12], [17, 3, 5]
    keys = [normal(rng, n, 2 * 5) for n in lengths]
    cache, table = paged(rng, "bf16", keys, request.block_size)
    rows = cache.view(*cache.shape[:2], 2, 5)
    entries = torch.full((20, 4, 2, 5), float("nan"), dtype=torch.float64)
    entry_table = torch.randperm(18).view(3, 6).int()
    meta = NsaMetadata(
        starts_of(new), torch.tensor(lengths).int(), table, entry_table, max(new), max(lengths)
    )
    reference(request, weights=weights)(rows, entries, meta)
    for i, one in enumerate(keys):
        count = request.entries_at(lengths[i])
        first = request.entries_at(lengths[i] - new[i])
        got = entries[entry_table[i].long()].flatten(0, 1)
        assert got[:first].isnan().all()
        assert got[count:].isnan().all()
        if count == first:
            continue
        blocks = one.view(-1, 2, 5).unfold(0, request.compress_length, request.compress_stride)
        blocks = blocks.permute(0, 1, 3, 2) + weights.position  # [entries, heads, l, D]
        assert len(blocks) == count
        assert_within("nsa_compress", got[first:count], module(blocks.flatten(2))[first:].detach())
    assert entries[18:].isnan().all()


def test_the_order_within_a_block_is_seen() -> None:
    """By the position encoding alone, where w1 sums the rows."""
    request = request_of(num_kv_heads=1, compress_length=2, head_dim=1, hidden_size=1)
    ones = torch.ones(1, 2, dtype=torch.float64)
    for position in (torch.zeros(2, 1), torch.tensor([[0.0], [3.0]])):
        weights = NsaCompressWeights(ones, ones[:, :1], position.double())
        rows = torch.tensor([1.0, -2.0, 0.0, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
        entries, table = torch.zeros_like(rows), torch.zeros(1, 1, dtype=torch.int32)
        meta = NsaMetadata(starts_of([2]), torch.tensor([2]).int(), table, table, 2, 2)
        reference(request, weights=weights)(rows, entries, meta)
        total = torch.tensor(-1.0 + float(position.sum()), dtype=torch.float64)
        torch.testing.assert_close(entries[0, 0, 0, 0], nn.functional.silu(total))


def test_work_is_counted() -> None:
    entries = 8192 / 16
    per_entry = 2 * 512 * 192 * (32 + 1)
    assert flops(KEYS, 8192) == entries * 4 * per_entry
    mlp = 512 * 192 * 33 + 32 * 192 + 512 + 192
    assert stored_bytes(KEYS) == 2 * mlp
    assert bytes_moved(KEYS, 8192) == 2 * (mlp + (8192 + entries) * 4 * 192)
    decode = dataclasses.replace(KEYS, phase="decode")
    assert bytes_moved(decode, 16) == 2 * (mlp + (32 + 1) * 4 * 192)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"hidden_size": 0},
        {"block_size": 0},
        {"compress_stride": 0},
        {"compress_stride": 4},
        {"compress_length": 1},
    ],
    ids=str,
)
def test_requests_that_are_not_consistent(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="nsa_compress request"):
        request_of(**wrong)
