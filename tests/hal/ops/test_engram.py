"""Engram: hashes and rows by hand and in Python integers, the gate from its formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import RequestError
from hal.ops.engram import EngramRequest, bytes_moved, flops, reference
from hal.ops.low_precision import quantize_groups
from op_inputs import UNTIMED, assert_within, normal

GATHER = EngramRequest(
    num_heads=3, max_ngram=4, row_width=32, hidden_size=16, num_streams=4, dtype="float64"
)
MIX = dataclasses.replace(GATHER, kind="mix")


def numbered_table(rows: int, width: int) -> torch.Tensor:
    """Every value of row r is r // 8 in e4m3 (below 16 exact), times 2^(r % 8)."""
    values = (torch.arange(rows) // 8).float()[:, None].expand(rows, width)
    exponents = (torch.arange(rows) % 8 + 127)[:, None].expand(rows, width // 32)
    stored = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((stored, exponents.to(torch.uint8)), dim=1)


def test_hashes_by_hand() -> None:
    """ids 5, 3, 2 with odd multipliers 7, 11, 13: 35, 35 ^ 33 = 2, 2 ^ 26 = 24."""
    request = dataclasses.replace(GATHER, num_heads=2, max_ngram=3)
    kernel = reference(
        request,
        table=numbered_table(100, 32),
        multipliers=torch.tensor([7, 11, 13]),
        primes=torch.tensor([[17, 19], [23, 29]]),
        offsets=torch.tensor([[0, 17], [36, 59]]),
    )
    got = kernel(torch.tensor([[5, 3, 2]]))
    rows = [2 % 17 + 0, 2 % 19 + 17, 24 % 23 + 36, 24 % 29 + 59]
    assert rows == [2, 19, 37, 83]
    want = [r // 8 * 2.0 ** (r % 8) for r in rows]
    assert got.view(4, 32).tolist() == [[v] * 32 for v in want]
    assert got.dtype == torch.float64


@UNTIMED
@given(
    ids=st.lists(st.lists(st.integers(0, 99_091), min_size=4, max_size=4), min_size=1, max_size=5),
    seed=st.integers(1, 40),
)
def test_rows_are_those_of_python_integers(ids: list[list[int]], seed: int) -> None:
    """Multipliers as large as the released ones: products that nearly fill 63 bits."""
    high = np.iinfo(np.int64).max // 99_092 // 2
    draws = np.random.default_rng(10007 * seed).integers(0, high, 4, dtype=np.int64)
    multipliers = [int(v) * 2 + 1 for v in draws]
    primes = [[11, 13, 17], [19, 23, 29], [31, 37, 41]]
    offsets, at = [], 0
    for row in primes:
        offsets.append([at, at + row[0], at + row[0] + row[1]])
        at += sum(row)
    request = dataclasses.replace(GATHER, dtype="float32")
    table = torch.randint(0, 120, (at, 33), dtype=torch.uint8)
    got = reference(
        request,
        table=table,
        multipliers=torch.tensor(multipliers),
        primes=torch.tensor(primes),
        offsets=torch.tensor(offsets),
    )(torch.tensor(ids))
    for t, tokens in enumerate(ids):
        hashed, rows = tokens[0] * multipliers[0], []
        for n in range(1, 4):
            hashed ^= tokens[n] * multipliers[n]
            rows += [hashed % p + o for p, o in zip(primes[n - 1], offsets[n - 1], strict=True)]
        packed = table[rows]
        values = packed[:, :32].contiguous().view(torch.float8_e4m3fn).float()
        want = values * packed[:, 32:].view(torch.float8_e8m0fnu).float()
        assert torch.equal(got[t], want.flatten())


def test_a_table_row_is_what_the_quantiser_stores(rng: torch.Generator) -> None:
    request = dataclasses.replace(GATHER, max_ngram=2, num_heads=1, row_width=256, dtype="bfloat16")
    dense = normal(rng, 7, 256, dtype="float32")
    values, scales = quantize_groups(dense, group_size=32, element="fp8_e4m3fn", scale_kind="ue8m0")
    table = torch.cat((values.view(torch.uint8), scales), dim=1)
    assert table.shape == (7, 264) == (7, request.row_bytes)
    ids = torch.tensor([[i, 0] for i in range(7)])
    got = reference(
        request,
        table=table,
        multipliers=torch.tensor([1, 1]),
        primes=torch.tensor([[7]]),
        offsets=torch.tensor([[0]]),
    )(ids)
    assert got.dtype == torch.bfloat16
    assert ((got.float() - dense).abs() <= dense.abs() * 2.0**-4 + 2.0**-8).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_streams_add_the_gated_value(rng: torch.Generator, dtype: str) -> None:
    request = dataclasses.replace(MIX, dtype=dtype)
    streams, kv = normal(rng, 6, 4, 16, dtype=dtype), normal(rng, 6, 5 * 16, dtype=dtype)
    streams[2, 1] = 0.0
    query_weight, key_weight = normal(rng, 4, 16), normal(rng, 4, 16)
    got = reference(request, query_weight=query_weight, key_weight=key_weight, eps=1e-20)(
        streams, kv
    )
    assert got.dtype == streams.dtype
    want = torch.empty(6, 4, 16, dtype=torch.float64)
    for t in range(6):
        value = kv[t, 64:].double()
        for h in range(4):
            query, key = streams[t, h].double(), kv[t, h * 16 : h * 16 + 16].double()
            a = query / math.sqrt(float((query**2).mean()) + 1e-20) * query_weight[h]
            b = key / math.sqrt(float((key**2).mean()) + 1e-20) * key_weight[h]
            d = float(a @ b) / math.sqrt(16)
            gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(abs(d)), d)))
            want[t, h] = query + gate * value
    assert_within("engram", got, want)


def test_a_key_that_does_not_match_halves_the_value(rng: torch.Generator) -> None:
    streams, kv = torch.zeros(1, 4, 16, dtype=torch.float64), normal(rng, 1, 80)
    ones = torch.ones(4, 16)
    got = reference(MIX, query_weight=ones, key_weight=ones, eps=1e-20)(streams, kv)
    assert_within("engram", got, (kv[:, 64:] / 2)[:, None].expand(1, 4, 16))


def test_work_is_that_of_the_real_tensors() -> None:
    gather = EngramRequest(
        num_heads=8, max_ngram=4, row_width=256, hidden_size=5120, num_streams=4, dtype="bfloat16"
    )
    assert gather.rows_per_token == 24
    assert gather.row_bytes == 264
    assert bytes_moved(gather, 3) == 3 * (24 * (264 + 512) + 4 * 8)
    mix = dataclasses.replace(gather, kind="mix")
    rows = 4 * 5120 * 2
    assert bytes_moved(mix, 3) == 3 * (2 * rows + rows + 5120 * 2) + 2 * rows
    assert flops(mix, 2) == 2 * flops(mix, 1) > 0
    assert gather.label == "engram.gather"


def test_what_is_missing_or_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match="required table, multipliers, primes and offsets"):
        reference(GATHER, table=torch.zeros(1, 33, dtype=torch.uint8))
    with pytest.raises(ValueError, match="required query_weight and key_weight"):
        reference(MIX)
    changes: dict[str, Any]
    for changes, message in (
        ({"max_ngram": 1}, "max_ngram >= 2"),
        ({"row_width": 40}, "row_width a multiple of 32"),
        ({"kind": "both"}, "kind one of"),
    ):
        with pytest.raises(RequestError, match=message):
            dataclasses.replace(GATHER, **changes)
