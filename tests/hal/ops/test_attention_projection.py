"""The meaning of attention with its output projection, against torch in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.attention_projection import (
    AttentionProjectionRequest,
    bytes_moved,
    flops,
    reference,
)
from op_inputs import assert_within

REQUEST = AttentionProjectionRequest(
    phase="decode",
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=16,
    hidden_size=40,
    block_size=4,
    dtype="float64",
    kv_dtype="float64",
)
LENGTHS = (1, 9, 30)


def decode(dtype: torch.dtype) -> tuple[Any, ...]:
    """Queries, caches with NaN where nothing was written, which is where, and the keys alone."""
    q = torch.randn(len(LENGTHS), 96).to(dtype)
    caches = [torch.full((16, 4, 2, 16), math.nan, dtype=dtype) for _ in "kv"]
    table = torch.full((len(LENGTHS), 9), -1, dtype=torch.int32)
    free, rows = torch.randperm(16).tolist(), []
    for sequence, length in enumerate(LENGTHS):
        blocks = [free.pop() for _ in range(-(-length // 4))]
        table[sequence, : len(blocks)] = torch.tensor(blocks)
        pair = [torch.randn(length, 2, 16).to(dtype) for _ in "kv"]
        for cache, values in zip(caches, pair, strict=True):
            for at in range(length):
                cache[blocks[at // 4], at % 4] = values[at]
        rows.append(pair)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    return q, *caches, AttentionMetadata(starts, lengths, table, 1, max(LENGTHS)), rows


@pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_it_is_torch_attention_times_the_weight(dtype: str, has_residual: bool) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    q, k, v, meta, rows = decode(torch_dtype)
    weight = (torch.randn(40, 96) / 10).to(torch_dtype)
    residual = torch.randn(len(LENGTHS), 40).to(torch_dtype) if has_residual else None
    request = dataclasses.replace(REQUEST, dtype=dtype, kv_dtype=dtype, has_residual=has_residual)
    got = reference(request, scale=0.25, weight=weight)(q, k, v, meta, residual)
    want = torch.stack(
        [
            functional.scaled_dot_product_attention(
                q[i].double().view(6, 1, 16),
                keys.double().transpose(0, 1).repeat_interleave(3, 0),
                values.double().transpose(0, 1).repeat_interleave(3, 0),
                scale=0.25,
            ).flatten()
            for i, (keys, values) in enumerate(rows)
        ]
    )
    want = want @ weight.double().T
    want = want if residual is None else want + residual.double()
    assert got.dtype == torch_dtype
    assert_within("attention_projection", got, want)


def test_arguments_reach_both_parts() -> None:
    request = dataclasses.replace(
        REQUEST, window=5, softcap=3.0, has_sinks=True, context_tokens=77, dtype="bfloat16",
        kv_dtype="bfloat16",
    )  # fmt: skip
    found = request.attention
    for field in dataclasses.fields(found):
        if hasattr(request, field.name):
            assert getattr(found, field.name) == getattr(request, field.name), field.name
    assert (request.projection.n, request.projection.k) == (40, 96)
    assert request.projection.weight_format.name == "bfloat16"
    attention = CATALOGUE["attention"].reference
    sinks, scale = torch.randn(6).bfloat16(), 0.3
    q, k, v, meta, _ = decode(torch.bfloat16)
    weight = torch.randn(40, 96).bfloat16()
    got = reference(request, scale=scale, weight=weight, sinks=sinks)(q, k, v, meta)
    apart = attention(found, scale=scale, sinks=sinks)(q, k, v, meta)
    assert_within("attention_projection", got, apart.double() @ weight.double().T)


def test_work_is_that_of_both_without_what_is_between() -> None:
    request = dataclasses.replace(REQUEST, has_residual=True, dtype="bfloat16", kv_dtype="bfloat16")
    parts = request.attention, request.projection
    for tokens in (1, 5):
        families = [CATALOGUE[part.op] for part in parts]
        assert flops(request, tokens) == sum(
            family.flops(part, tokens) for family, part in zip(families, parts, strict=True)
        )
        apart = sum(
            family.bytes_moved(part, tokens) for family, part in zip(families, parts, strict=True)
        )
        between, residual = 2 * tokens * 96 * 2, tokens * 40 * 2
        assert bytes_moved(request, tokens) == apart - between + residual


def test_what_does_not_fit_is_refused() -> None:
    weight = torch.randn(40, 96).double()
    with pytest.raises(ValueError, match="weight"):
        reference(REQUEST, scale=1.0, weight=weight[:, :95])
    with pytest.raises(ValueError, match="sinks"):
        reference(REQUEST, scale=1.0, weight=weight, sinks=torch.randn(6))
    q, k, v, meta, _ = decode(torch.float64)
    with pytest.raises(ValueError, match="residual"):
        reference(REQUEST, scale=1.0, weight=weight)(q, k, v, meta, torch.randn(3, 40))
    for wrong in ({"hidden_size": 0}, {"num_kv_heads": 4}, {"window": -1}):
        with pytest.raises(RequestError):
            dataclasses.replace(REQUEST, **wrong)
