"""Index lists: of whole rows, of pools against GLM-5.3-Flash, and within candidate blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.index_top_k import IndexTopKRequest, bytes_moved, reference
from hal.ops.kv_compressor import CompressorMetadata, KvCompressorRequest
from hal.ops.layer_norm import LayerNormRequest
from op_inputs import UNTIMED, metadata, normal, paged, starts_of
from oracle_modules import randomised

NAN, INF = float("nan"), float("inf")
# Few different scores, so that many are equal.
SCORES = st.sampled_from([0.0, -1.0, 2.5, 1e30, -1e30, NAN, -INF])


def largest(
    row: list[float], visible: int, count: int, allowed: set[int] | None = None
) -> list[int]:
    """Columns of the largest scores, of equal ones the lower: by Python's own sort."""
    columns = [i for i in range(min(visible, len(row))) if row[i] > -INF]
    columns = [i for i in columns if allowed is None or i in allowed]
    columns.sort(key=lambda i: (-row[i], i))
    return (columns + [-1] * count)[:count]


@UNTIMED
@given(
    rows=st.lists(
        st.tuples(st.lists(SCORES, min_size=9, max_size=9), st.integers(0, 9)), min_size=1
    ),
    top_k=st.integers(1, 12),
)
def test_lists_are_the_largest_and_the_lower_of_equals(
    rows: list[tuple[list[float], int]], top_k: int
) -> None:
    logits = torch.tensor([row for row, _ in rows])
    visible = torch.tensor([count for _, count in rows], dtype=torch.int32)
    got = reference(IndexTopKRequest(top_k=top_k))(logits, visible)
    assert got.dtype == torch.int32
    assert got.tolist() == [largest(row, count, top_k) for row, count in rows]


def test_no_entries_at_all() -> None:
    got = reference(IndexTopKRequest(top_k=3))(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32))
    assert got.tolist() == [[-1, -1, -1]] * 2


@UNTIMED
@given(
    scores=st.lists(SCORES, min_size=7, max_size=7),
    visible=st.integers(0, 31),
    pool=st.integers(2, 4),
    pools=st.integers(1, 9),
)
def test_pools_are_chosen_whole_and_the_open_tail_is_added(
    scores: list[float], visible: int, pool: int, pools: int
) -> None:
    visible = min(visible, 7 * pool + pool - 1)
    request = IndexTopKRequest(top_k=pools * pool, pool_size=pool)
    got = reference(request)(torch.tensor([scores]), torch.tensor([visible], dtype=torch.int32))[0]
    assert len(got) == request.width == pools * pool + pool - 1
    chosen = [p for p in largest(scores, visible // pool, pools) if p >= 0]
    want = [p * pool + i for p in chosen for i in range(pool)]
    want += range(visible // pool * pool, visible)
    assert sorted(i for i in got.tolist() if i >= 0) == sorted(want)
    assert (got >= -1).all()


@UNTIMED
@given(
    rows=st.lists(
        st.tuples(st.lists(SCORES, min_size=37, max_size=37), st.integers(0, 37)), min_size=1
    ),
    blocks=st.integers(1, 6),
    top_k=st.integers(1, 8),
)
def test_published_blocks_bound_the_choice_of_later_layers(
    rows: list[tuple[list[float], int]], blocks: int, top_k: int
) -> None:
    logits = torch.tensor([row for row, _ in rows])
    visible = torch.tensor([count for _, count in rows], dtype=torch.int32)
    publish = IndexTopKRequest(top_k=top_k, candidate_blocks=blocks, publishes_candidates=True)
    chosen, candidates = reference(publish)(logits, visible)
    limited = IndexTopKRequest(top_k=top_k, candidate_blocks=blocks)
    later = logits.flip(1)
    within = reference(limited)(later, visible, candidates)
    for i, (row, count) in enumerate(rows):
        assert chosen[i].tolist() == largest(row, count, top_k)
        best = []
        for first in range(0, 37, 8):
            part = [v for v in row[first : min(first + 8, count)] if v > -INF]
            is_newest = first <= count - 1 < first + 8
            best.append(INF if is_newest else max(part, default=-INF))
        assert candidates[i].tolist() == largest(best, 5, blocks)
        allowed = {b * 8 + j for b in candidates[i].tolist() if b >= 0 for j in range(8)}
        assert within[i].tolist() == largest(row[::-1], count, top_k, allowed)


def test_lists_within_all_blocks_are_lists_of_everything(rng: torch.Generator) -> None:
    logits = normal(rng, 6, 61)
    visible = torch.tensor([0, 1, 8, 9, 60, 61], dtype=torch.int32)
    publish = IndexTopKRequest(top_k=16, candidate_blocks=8, publishes_candidates=True)
    chosen, candidates = reference(publish)(logits, visible)
    limited = IndexTopKRequest(top_k=16, candidate_blocks=8)
    assert torch.equal(reference(limited)(logits, visible, candidates), chosen)
    newest = [(int(v) - 1) // 8 for v in visible if v > 0]
    assert candidates[1:, 0].tolist() == newest


@pytest.mark.parametrize("has_tail", [True, False], ids=["tail", "no tail"])
def test_pools_of_glm_5_3_flash(rng: torch.Generator, has_tail: bool) -> None:
    """Pooled keys by the compressor op, scores and choice by theirs."""
    config = Glm5NextTextConfig(
        hidden_size=40,
        q_lora_rank=24,
        index_n_heads=32,
        index_head_dim=20,
        index_topk=12,
        index_kpool=4,
        index_kpool_always_select_tail=has_tail,
    )
    length = 46
    module: Any = randomised(Glm5NextTextIndexer(config, layer_idx=0), rng)
    x = normal(rng, 1, length, 40, dtype="float32")
    residual = normal(rng, 1, length, 24, dtype="float32")
    with torch.no_grad():
        found = module(x, residual, torch.ones(1, length, dtype=torch.bool), None)[0]
        q = module.wq_b(residual)[0].double()
        k = module.wk(x)[0].double()
        gate = (x @ module.index_kpool_compress_gate.T)[0].double()
        weights = module.weights_proj(x)[0].double() * 32**-0.5
        bias = module.index_kpool_compress_ape.detach()
    norm = LayerNormRequest(hidden_size=20, has_bias=True, dtype="float64")
    keys = CATALOGUE["layer_norm"].reference(
        norm, weight=module.k_norm.weight.detach(), bias=module.k_norm.bias.detach(), eps=1e-6
    )(k)
    pooling = KvCompressorRequest(
        ratio=4, head_dim=20, is_overlapping=False, dtype="float64", has_norm=False
    )
    meta = CompressorMetadata(
        query_start_loc=starts_of([length]),
        seq_lens=torch.tensor([length]),
        state_slots=torch.tensor([0]),
        entry_start_loc=starts_of([length // 4]),
    )
    pool = CATALOGUE["kv_compressor"].reference(pooling, position_bias=bias)
    pooled = pool(keys, gate, torch.zeros(1, 4, 2, 20, dtype=torch.float64), meta)
    scoring = IndexLogitsRequest(
        num_heads=32,
        head_dim=20,
        key_format="bf16",
        block_size=8,
        dtype="float64",
        compress_ratio=4,
    )
    cache, table = paged(rng, "bf16", [pooled], 8)
    logits = CATALOGUE["index_logits"].reference(scoring, scale=20**-0.5)(
        q, weights, cache, metadata([(length, length)], table)
    )
    visible = torch.arange(1, length + 1, dtype=torch.int32)
    got = reference(IndexTopKRequest(top_k=12, pool_size=4))(logits, visible)
    if not has_tail:
        got = got[:, :12]
    slack = 1e-5 * float(logits[logits.isfinite()].abs().max())
    for row in range(length):
        theirs = {i for i in found[row].tolist() if i >= 0}
        ours = {i for i in got[row].tolist() if i >= 0}
        assert len(theirs) == len(ours)
        pools = [i // 4 for i in ours if i // 4 < (row + 1) // 4]
        last = min((float(logits[row, p]) for p in pools), default=0.0)
        assert all(abs(float(logits[row, i // 4]) - last) <= slack for i in theirs ^ ours)


def test_work_is_that_of_the_real_tensors() -> None:
    decode = IndexTopKRequest(top_k=512, phase="decode", context_tokens=8192, compress_ratio=2)
    assert bytes_moved(decode, 3) == 3 * (4096 * 4 + 4 + 512 * 4)
    limited = dataclasses.replace(decode, candidate_blocks=64)
    assert bytes_moved(limited, 1) == 64 * 8 * 4 + 4 + 512 * 4 + 64 * 4
    publish = dataclasses.replace(limited, publishes_candidates=True)
    assert bytes_moved(publish, 1) == 4096 * 4 + 4 + 512 * 4 + 64 * 4
    pools = IndexTopKRequest(top_k=64, pool_size=16, phase="decode", context_tokens=1600)
    assert bytes_moved(pools, 1) == 100 * 4 + 4 + (64 + 15) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 0}, "top_k >= 1"),
        ({"top_k": 100, "pool_size": 16}, "a multiple of pool_size 16"),
        ({"top_k": 8, "publishes_candidates": True}, "candidate_blocks to publish"),
        ({"top_k": 16, "pool_size": 16, "candidate_blocks": 4}, "no pools with candidate"),
        ({"top_k": 512, "candidate_blocks": 63}, "63 blocks of 8 for 512"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        IndexTopKRequest(**arguments)


def test_candidates_must_be_given_where_they_are_wanted() -> None:
    logits, visible = torch.zeros(1, 8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="required candidates, found none"):
        reference(IndexTopKRequest(top_k=2, candidate_blocks=1))(logits, visible)
    with pytest.raises(ValueError, match="required no candidates"):
        reference(IndexTopKRequest(top_k=2))(logits, visible, torch.zeros(1, 1))
