"""Native sparse attention: the reference against torch's own attention, query by query and head by
head, and importances counted stride by stride."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hal.errors import RequestError
from hal.ops.nsa_attention import (
    NsaAttentionRequest,
    NsaCaches,
    NsaMetadata,
    block_scores,
    bytes_moved,
    flops,
    reference,
    select_blocks,
)
from op_inputs import assert_within, normal, paged, starts_of

PAPER = NsaAttentionRequest(
    num_heads=64, num_kv_heads=4, head_dim=192, v_head_dim=128, block_size=64, dtype="bfloat16"
)


def request_of(**fields: Any) -> NsaAttentionRequest:
    defaults: dict[str, Any] = {
        "phase": "prefill",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 6,
        "block_size": 4,
        "dtype": "float64",
        "compress_length": 4,
        "compress_stride": 2,
        "select_size": 6,
        "num_selected": 3,
        "num_initial": 1,
        "num_local": 1,
        "window": 5,
        "publishes_blocks": True,
    }
    return NsaAttentionRequest(**(defaults | fields))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: list[int], head: int
) -> torch.Tensor:
    """One head of one query over the rows it sees; zero where there are none."""
    if not seen:
        return torch.zeros(6, dtype=torch.float64)
    keys, values = k.view(-1, 2, 8)[seen, head // 2], v.view(-1, 2, 6)[seen, head // 2]
    return scaled_dot_product_attention(q[None], keys, values, scale=0.4)[0]


def importance(request: NsaAttentionRequest, q: torch.Tensor, k: torch.Tensor, at: int) -> Any:
    """[Hk, blocks]: each probability counts for every stride of its entry, in that stride's block,
    summed over the query's heads of a cached head."""
    stride, size = request.compress_stride, request.select_size
    entries = [e for e in range(at) if e * stride + request.compress_length <= at + 1]
    scores = torch.zeros(2, at // size + 1, dtype=torch.float64)
    for head in range(4):
        if not entries:
            continue
        logits = k.view(-1, 2, 8)[entries, head // 2] @ q.view(4, 8)[head] * 0.4
        for entry, share in zip(entries, logits.softmax(dim=0), strict=True):
            for part in range(request.compress_length // stride):
                block = (entry + part) * stride // size
                if block < scores.shape[1]:
                    scores[head // 2, block] += share
    return scores


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"compress_length": 2, "num_initial": 0, "num_local": 2},
        {"compress_length": 6, "select_size": 6, "num_local": 0, "window": 1},
        {"compress_length": 3, "compress_stride": 3, "select_size": 3, "num_selected": 2},
        {"num_selected": 12},
    ],
)
def test_against_torchs_attention(rng: torch.Generator, fields: dict[str, Any]) -> None:
    request = request_of(**fields)
    lengths = [(9, 9), (7, 0), (40, 3), (1, 1)]
    counts = [request.entries_at(n) for n, _ in lengths]
    rows = {
        "entry": [(normal(rng, n, 16), normal(rng, n, 12)) for n in counts],
        "selected": [(normal(rng, n, 16), normal(rng, n, 12)) for n, _ in lengths],
        "window": [(normal(rng, n, 16), normal(rng, n, 12)) for n, _ in lengths],
    }
    caches, tables = [], {}
    for branch, pairs in rows.items():
        seed = torch.Generator().manual_seed(int(branch != "entry"))  # positions share a table
        cache, tables[branch] = paged(seed, "bf16", [torch.cat(p, dim=1) for p in pairs], 4)
        caches += [cache[..., :16].unflatten(-1, (2, 8)), cache[..., 16:].unflatten(-1, (2, 6))]
    starts = starts_of([new for _, new in lengths])
    meta = NsaMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor([n for n, _ in lengths], dtype=torch.int32),
        block_table=tables["window"],
        entry_block_table=tables["entry"],
        max_query_len=9,
        max_seq_len=40,
    )
    q, gates = normal(rng, int(starts[-1]), 32), normal(rng, int(starts[-1]), 4, 3)
    got, blocks = reference(request, scale=0.4)(q, gates, NsaCaches(*caches), meta)
    for i, (length, new) in enumerate(lengths):
        for row in range(new):
            at, token = length - new + row, int(starts[i]) + row
            scores = importance(request, q[token], rows["entry"][i][0], at)
            for head in range(4):
                chosen = expected_blocks(request, scores[head // 2], at)
                assert sorted(b for b in blocks[token, head // 2].tolist() if b >= 0) == chosen
                seen = {
                    "entry": list(range(request.entries_at(at + 1))),
                    "selected": [p for p in range(at + 1) if p // request.select_size in chosen],
                    "window": list(range(max(0, at + 1 - request.window), at + 1)),
                }
                query = q[token].view(4, 8)[head]
                want = sum(
                    torch.sigmoid(gates[token, head, b]) * attend(query, *rows[name][i], at, head)
                    for b, (name, at) in enumerate(seen.items())
                )
                assert_within("nsa_attention", got[token].view(4, 6)[head], want)


def expected_blocks(request: NsaAttentionRequest, scores: torch.Tensor, at: int) -> list[int]:
    own = at // request.select_size
    forced = {b for b in range(own + 1) if b < request.num_initial or b > own - request.num_local}
    others = [b for b in range(own + 1) if b not in forced]
    others.sort(key=lambda b: (-float(scores[b]), b))
    return sorted([*forced, *others][: request.num_selected])


def test_formula_9_in_the_papers_numbers() -> None:
    """l = 32, d = 16, l' = 64: a block counts its own entries twice, the two at its edges once."""
    shares = torch.arange(1.0, 13.0)
    scores = block_scores(PAPER, shares, 3)
    assert scores.tolist() == [
        2 * (1 + 2 + 3) + 4,
        4 + 2 * (5 + 6 + 7) + 8,
        8 + 2 * (9 + 10 + 11) + 12,
    ]
    one = NsaAttentionRequest(
        **{**PAPER.arguments(), "compress_length": 64, "compress_stride": 64, "phase": "any"}
    )
    assert block_scores(one, shares, 12).equal(shares)


def test_of_equal_importances_the_lower_block_is_chosen_and_nan_is_none() -> None:
    request = request_of(num_selected=3)
    scores = block_scores(request, torch.full((1, 2, 20), float("nan")), 7)
    assert not scores.any()
    blocks = select_blocks(request, scores, torch.tensor([40]))
    assert blocks.tolist() == [[[0, 6, 1], [0, 6, 1]]]


def test_work_is_that_of_the_rows_that_are_seen() -> None:
    request = request_of(num_heads=2, num_kv_heads=1)
    assert [request.entries_at(n) for n in range(9)] == [0, 0, 0, 0, 1, 1, 2, 2, 3]
    entries = sum(request.entries_at(n + 1) for n in range(30))
    selected, window = sum(min(n + 1, 18) for n in range(30)), sum(min(n + 1, 5) for n in range(30))
    assert flops(request, 30) == 2 * 2 * 14 * (entries + selected + window) + 2 * entries
    assert bytes_moved(request, 30) == (
        (request.entries_at(30) + 2 * 30 + 2 * 30) * 14 * 8 + 3 * 30 * 2 * 8 + 30 * 3 * 4
    )
    decode = request_of(
        num_heads=2, num_kv_heads=1, phase="decode", context_tokens=100, publishes_blocks=False
    )
    rows = request.entries_at(100) + 18 + 5
    assert flops(decode, 3) == 3 * (2 * 2 * 14 * rows + 2 * request.entries_at(100))
    assert bytes_moved(decode, 3) == (3 * rows + 2 * 3) * 14 * 8 + 3 * 3 * 2 * 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_heads": 3},
        {"compress_length": 5},
        {"compress_length": 8},
        {"compress_stride": 0},
        {"select_size": 7},
        {"num_selected": 1},
        {"num_local": -1},
        {"window": 0},
    ],
)
def test_requests_that_are_not_consistent(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="nsa_attention request"):
        request_of(**wrong)
