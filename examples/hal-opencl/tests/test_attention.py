"""Attention over a paged cache against torch's own attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal_opencl.attention import load_attention

BLOCK = 16
TOLERANCE = 2e-5  # of values of size 1: weights are positive and sum to 1


class Case:
    """Random sequences over blocks in random order; what no sequence owns is not a number."""

    def __init__(
        self, generator: torch.Generator, request: AttentionRequest, lengths: list[tuple[int, int]]
    ) -> None:
        self.request, self.lengths = request, lengths
        tables = [-(-total // BLOCK) for _, total in lengths]
        order = torch.randperm(sum(tables) + 3, generator=generator).int()
        shape = (sum(tables) + 3, BLOCK, request.num_kv_heads)
        self.k_cache = torch.full((*shape, request.head_dim), float("nan"))
        self.v_cache = torch.full((*shape, request.v_head_dim), float("nan"))
        table = torch.zeros(len(lengths), max(tables), dtype=torch.int32)
        self.keys, self.values, self.queries = [], [], []
        for row, (count, (new, total)) in enumerate(zip(tables, lengths, strict=True)):
            blocks, order = order[:count], order[count:]
            table[row, :count] = blocks
            for cache, parts, size in (
                (self.k_cache, self.keys, request.head_dim),
                (self.v_cache, self.values, request.v_head_dim),
            ):
                part = torch.randn(total, request.num_kv_heads, size, generator=generator)
                parts.append(part)
                slots = torch.arange(total)
                cache[blocks.long()[slots // BLOCK], slots % BLOCK] = part
            heads = (new, request.num_heads, request.head_dim)
            self.queries.append(2 * torch.randn(heads, generator=generator))
        starts = torch.tensor([0, *[new for new, _ in lengths]]).cumsum(0)
        self.meta = AttentionMetadata(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor([total for _, total in lengths], dtype=torch.int32),
            block_table=table,
            max_query_len=max(new for new, _ in lengths),
            max_seq_len=max(total for _, total in lengths),
        )

    def check(self, device: DeviceSpec, sinks: torch.Tensor | None = None) -> None:
        scale = self.request.head_dim**-0.5
        q = torch.cat(self.queries).flatten(1)
        # Rows of a packed projection: the query is a part of a wider row.
        wide = torch.cat((torch.full_like(q, float("nan")), q), dim=1)
        kernel = load_attention(device)(self.request, scale=scale, sinks=sinks)
        got = kernel(wide[:, q.shape[1] :], self.k_cache, self.v_cache, self.meta)
        wants = [
            self._exact(q, k, v, scale, sinks)
            for q, k, v in zip(self.queries, self.keys, self.values, strict=True)
        ]
        torch.testing.assert_close(
            got.double(), torch.cat(wants).flatten(1), rtol=0.0, atol=TOLERANCE
        )

    def _exact(self, q: Any, k: Any, v: Any, scale: float, sinks: Any) -> torch.Tensor:
        request = self.request
        group = request.num_heads // request.num_kv_heads
        keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
        if request.softcap:
            scores = request.softcap * torch.tanh(scores / request.softcap)
        at = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
        key = torch.arange(k.shape[0])[None, :]
        hidden = key > at if request.is_causal else torch.zeros_like(key > at)
        if request.window:
            hidden |= key <= at - request.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            extra = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : k.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, values)


def _request(phase: Any, **changes: Any) -> AttentionRequest:
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32}
    dtypes = {"block_size": BLOCK, "dtype": "float32", "kv_dtype": "float32"}
    return AttentionRequest(phase=phase, **(shape | dtypes | changes))


VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 21},
    {"softcap": 5.0},
    {"has_sinks": True},
    {"window": 40, "softcap": 20.0, "has_sinks": True},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "v_head_dim": 48},
    {"num_heads": 9, "num_kv_heads": 1},
]


def _sinks(request: AttentionRequest, generator: torch.Generator) -> torch.Tensor | None:
    return torch.randn(request.num_heads, generator=generator) if request.has_sinks else None


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(
    any_memory: DeviceSpec, generator: torch.Generator, variant: dict[str, Any]
) -> None:
    """Whole prompts, chunks behind a context, single tokens; all in one call."""
    request = _request("prefill", **variant)
    more = int(torch.randint(1, 60, (), generator=generator))
    lengths = [(1, 1), (more, more), (7, 7 + more), (16, 16), (33, 90), (1, 70)]
    Case(generator, request, lengths).check(any_memory, _sinks(request, generator))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("longest", [40, 700])
def test_decode(
    any_memory: DeviceSpec, generator: torch.Generator, variant: dict[str, Any], longest: int
) -> None:
    """One token each; 700 keys are shared among work-items and combined."""
    request = _request("decode", **variant)
    total = int(torch.randint(1, longest, (), generator=generator))
    Case(generator, request, [(1, longest), (1, total)]).check(
        any_memory, _sinks(request, generator)
    )


def test_without_causality(device: DeviceSpec, generator: torch.Generator) -> None:
    Case(generator, _request("prefill", is_causal=False), [(5, 5), (40, 40)]).check(device)


def test_sinks_as_the_request_says(device: DeviceSpec) -> None:
    with pytest.raises(ValueError, match="sinks"):
        load_attention(device)(_request("decode", has_sinks=True), scale=1.0)
