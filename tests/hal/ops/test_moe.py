"""Routers against transformers', dispatch against loops over tokens and experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV4Config, DeepseekV32Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HashRouter,
    DeepseekV4TopKRouter,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hal.errors import RequestError
from hal.ops import CATALOGUE
from hal.ops.activation import GatedActivationRequest
from hal.ops.gemm import GroupedGemmRequest
from hal.ops.moe_dispatch import MoeDispatchRequest
from hal.ops.moe_router import MoeRouterRequest, bytes_moved, reference
from hal.ops.weight_formats import FORMATS
from op_inputs import UNTIMED, assert_within, normal
from oracle_modules import randomised


def dense_weights(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, experts] with each chosen expert's weight: the order of the choice does not matter."""
    empty = torch.zeros(len(ids), experts, dtype=torch.float64)
    return empty.scatter(1, ids.long(), weights.double())


def assert_close_but_for_a_tie(got: torch.Tensor, want: torch.Tensor) -> None:
    """Dense weights agree. One token may have two scores that float32 cannot tell apart."""
    same = ((got > 0) == (want > 0)).all(dim=1)
    assert int((~same).sum()) <= 1
    torch.testing.assert_close(got[same], want[same], rtol=1e-4, atol=1e-6)


def assert_same_routing(
    module: Any, request: MoeRouterRequest, x: torch.Tensor, **given: Any
) -> None:
    """The module's own forward on x against our op on its logits."""
    static = {k: v for k, v in given.items() if k in ("bias", "expert_table")}
    tokens = [given["token_ids"]] if "token_ids" in given else []
    with torch.no_grad():
        logits, weights, ids = module(x, *tokens)
    got_weights, got_ids = reference(request, **static)(logits.double(), *tokens)
    assert got_ids.dtype == torch.int32
    assert got_weights.shape == got_ids.shape == (len(x), request.top_k)
    want = dense_weights(weights, ids, request.num_experts)
    got = dense_weights(got_weights, got_ids, request.num_experts)
    assert_close_but_for_a_tie(got, want)


@pytest.mark.parametrize("normalizes", [True, False], ids=["normalised", "as they are"])
def test_softmax_router_of_qwen3(rng: torch.Generator, normalizes: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=16, num_experts=24, num_experts_per_tok=5, norm_topk_prob=normalizes
    )
    module = randomised(Qwen3MoeTopKRouter(config), rng)
    request = MoeRouterRequest(scoring="softmax", num_experts=24, top_k=5, normalizes=normalizes)
    x = normal(rng, 40, 16, dtype="float32")
    assert_same_routing(module, request, x)


@pytest.mark.parametrize(
    ("config_type", "router_type"),
    [(DeepseekV3Config, DeepseekV3TopkRouter), (DeepseekV32Config, DeepseekV32TopkRouter)],
    ids=["v3", "v3.2"],
)
@pytest.mark.parametrize(("groups", "picked"), [(8, 4), (8, 1), (1, 1), (4, 4)])
@pytest.mark.parametrize("normalizes", [True, False], ids=["normalised", "as they are"])
def test_grouped_sigmoid_router_of_deepseek(
    rng: torch.Generator,
    config_type: Any,
    router_type: Any,
    groups: int,
    picked: int,
    normalizes: bool,
) -> None:
    config = config_type(
        hidden_size=16,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=picked,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalizes,
    )
    module = randomised(router_type(config), rng)
    bias = normal(rng, 32, dtype="float32") * 0.1
    module.e_score_correction_bias.data.copy_(bias)
    request = MoeRouterRequest(
        scoring="sigmoid",
        num_experts=32,
        top_k=4,
        num_groups=groups,
        num_groups_picked=picked,
        has_bias=True,
        normalizes=normalizes,
        route_scale=2.5,
    )
    assert_same_routing(module, request, normal(rng, 50, 16, dtype="float32"), bias=bias)


@pytest.mark.parametrize("is_hash", [True, False], ids=["hash", "top-k"])
def test_sqrt_softplus_routers_of_v4(rng: torch.Generator, is_hash: bool) -> None:
    config = DeepseekV4Config(
        hidden_size=16, n_routed_experts=20, num_experts_per_tok=6, vocab_size=50
    )
    module = randomised((DeepseekV4HashRouter if is_hash else DeepseekV4TopKRouter)(config), rng)
    request = MoeRouterRequest(
        scoring="hash" if is_hash else "sqrt_softplus",
        num_experts=20,
        top_k=6,
        has_bias=not is_hash,
        route_scale=1.5,
    )
    x = normal(rng, 40, 16, dtype="float32")
    if is_hash:
        rows = [torch.randperm(20, generator=rng)[:6] for _ in range(50)]
        module.tid2eid.copy_(torch.stack(rows))
        ids = torch.randint(0, 50, (40,), generator=rng)
        assert_same_routing(module, request, x, expert_table=module.tid2eid, token_ids=ids)
    else:
        bias = normal(rng, 20, dtype="float32") * 0.1
        module.e_score_correction_bias.data.copy_(bias)
        assert_same_routing(module, request, x, bias=bias)


@UNTIMED
@given(
    scores=st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=12, max_size=12),
    top_k=st.integers(1, 6),
    picked=st.integers(2, 4),
)
def test_of_equal_scores_the_lower_expert_and_group_win(
    scores: list[float], top_k: int, picked: int
) -> None:
    """4 groups of 3; picked in Python by the sum of the two best."""
    request = MoeRouterRequest(
        scoring="sigmoid", num_experts=12, top_k=top_k, num_groups=4, num_groups_picked=picked
    )
    _, ids = reference(request)(torch.tensor([scores]).double())
    value = {s: 1 / (1 + math.exp(-s)) for s in set(scores)}
    groups = [[value[s] for s in scores[g * 3 : g * 3 + 3]] for g in range(4)]
    order = sorted(range(4), key=lambda g: (-round(sum(sorted(groups[g])[1:]), 12), g))
    allowed = [e for e in range(12) if e // 3 in order[:picked]]
    want = sorted(allowed, key=lambda e: (-value[scores[e]], e))[:top_k]
    assert ids[0].tolist() == want


def test_the_bias_chooses_and_does_not_weigh(rng: torch.Generator) -> None:
    request = MoeRouterRequest(scoring="sigmoid", num_experts=8, top_k=2, has_bias=True)
    logits, bias = normal(rng, 5, 8), torch.zeros(8)
    bias[[3, 6]] = 10.0
    weights, ids = reference(request, bias=bias)(logits)
    assert {tuple(sorted(row)) for row in ids.tolist()} == {(3, 6)}
    want = logits.sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights, want / want.sum(dim=1, keepdim=True))
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_routers_compute_in_float32_and_count_their_bytes(rng: torch.Generator) -> None:
    request = MoeRouterRequest(
        scoring="sigmoid", num_experts=64, top_k=8, has_bias=True, dtype="bfloat16"
    )
    logits, bias = normal(rng, 3, 64, dtype="bfloat16"), normal(rng, 64, dtype="float32")
    weights, ids = reference(request, bias=bias)(logits)
    assert weights.dtype == torch.float32
    moved = logits.nbytes + bias.nbytes + weights.nbytes + ids.nbytes
    assert bytes_moved(request, 3) == moved
    hashed = dataclasses.replace(request, scoring="hash", has_bias=False)
    assert bytes_moved(hashed, 3) == moved - bias.nbytes + 3 * 8 * 8 + 3 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "tanh"}, "scoring one of"),
        ({"top_k": 33}, "top_k <= 32"),
        ({"num_groups": 5}, "groups of equal size"),
        ({"num_groups": 32, "num_groups_picked": 9}, "at least two experts"),
        ({"num_groups": 4, "num_groups_picked": 5}, "num_groups_picked <= num_groups 4"),
        ({"num_groups": 8, "num_groups_picked": 1, "top_k": 5}, "top_k <= 4"),
        ({"scoring": "hash", "has_bias": True}, "neither bias nor groups"),
    ],
)
def test_impossible_routers_are_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"scoring": "sigmoid", "num_experts": 32, "top_k": 4}
    with pytest.raises(RequestError, match=message):
        MoeRouterRequest(**(good | changes))


def test_parts_must_be_those_of_the_request() -> None:
    request = MoeRouterRequest(scoring="sigmoid", num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="required not bias, found"):
        reference(request, bias=torch.zeros(4))
    with pytest.raises(ValueError, match="required an expert table, found none"):
        reference(MoeRouterRequest(scoring="hash", num_experts=4, top_k=2))
    with pytest.raises(ValueError, match="required not token ids"):
        reference(request)(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64))


# --- dispatch -------------------------------------------------------------------------------------


@UNTIMED
@given(ids=st.lists(st.lists(st.integers(-1, 5), min_size=3, max_size=3), min_size=1, max_size=9))
def test_rows_are_sorted_by_expert_then_by_token(ids: list[list[int]]) -> None:
    request = MoeDispatchRequest(
        kind="permute", num_experts=6, top_k=3, hidden_size=2, dtype="float64"
    )
    x = torch.arange(2.0 * len(ids), dtype=torch.float64).view(-1, 2)
    rows, offsets, source = CATALOGUE["moe_dispatch"].reference(request)(
        x, torch.tensor(ids, dtype=torch.int32)
    )
    flat = [e for row in ids for e in row]
    want = sorted((i for i, e in enumerate(flat) if e >= 0), key=lambda i: (flat[i], i))
    assert source.tolist() == want
    assert source.dtype == torch.int32
    assert torch.equal(rows, x[[i // 3 for i in want]] if want else x[:0])
    assert offsets.tolist() == [sum(0 <= e < expert for e in flat) for expert in range(7)]
    # Of a captured graph: as many rows as choices, of which the last have no source.
    graph = dataclasses.replace(request, graph_mode="graph")
    more, same, padded = CATALOGUE["moe_dispatch"].reference(graph)(
        x, torch.tensor(ids, dtype=torch.int32)
    )
    assert torch.equal(more[: len(want)], rows)
    assert torch.equal(same, offsets)
    assert padded.tolist() == want + [-1] * (len(flat) - len(want))
    assert len(more) == len(flat)
    weights = torch.rand(len(ids), 3, dtype=torch.float64)
    combine = [dataclasses.replace(one, kind="combine") for one in (request, graph)]
    sums = [CATALOGUE["moe_dispatch"].reference(one) for one in combine]
    more[len(want) :] = float("nan")
    assert torch.equal(sums[0](rows, source, weights), sums[1](more, padded, weights))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_experts_of_every_token_are_summed_by_weight(rng: torch.Generator, dtype: str) -> None:
    """permute, grouped product and combine against a loop over tokens and their experts."""
    tokens, experts, top_k, width = 13, 6, 3, 10
    x = normal(rng, tokens, width, dtype=dtype)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:top_k] for _ in range(tokens)])
    ids[4] = -1  # all of this token's experts are elsewhere
    ids[7, 1] = -1
    weights = torch.rand(tokens, top_k, generator=rng)
    matrices = normal(rng, experts, width, width, dtype=dtype)
    permute = MoeDispatchRequest(
        kind="permute", num_experts=experts, top_k=top_k, hidden_size=width, dtype=dtype
    )
    product = GroupedGemmRequest(
        num_experts=experts,
        experts_per_token=top_k,
        n=width,
        k=width,
        dtype=dtype,
        weight_format=FORMATS["float32"],
    )
    dispatch = CATALOGUE["moe_dispatch"]
    rows, offsets, source = dispatch.reference(permute)(x, ids.int())
    y = CATALOGUE["grouped_gemm"].reference(product, weight=matrices)(rows, offsets)
    combine = dataclasses.replace(permute, kind="combine")
    got = dispatch.reference(combine)(y, source, weights)
    want = torch.zeros(tokens, width, dtype=torch.float64)
    for t in range(tokens):
        for j in range(top_k):
            if ids[t, j] >= 0:
                out = (matrices[ids[t, j]].double() @ x[t].double()).to(x.dtype).double()
                want[t] += float(weights[t, j]) * out
    assert got.dtype == x.dtype
    assert torch.equal(got[4], torch.zeros_like(got[4]))
    # A product that falls to the other side of a rounding to bfloat16 is a step of its own.
    assert_within("moe_dispatch", got, want, 2.0)


@pytest.mark.parametrize("clamp", [0.0, 0.7])
def test_a_gated_product_is_the_product_and_the_activation_behind_it(
    rng: torch.Generator, clamp: float
) -> None:
    fields: dict[str, Any] = {"num_experts": 3, "experts_per_token": 1, "n": 12, "k": 8}
    plain = GroupedGemmRequest(dtype="float64", weight_format=FORMATS["float32"], **fields)
    gated = dataclasses.replace(plain, epilogue="silu_gated", clamp=clamp)
    x, offsets = normal(rng, 9, 8, dtype="float64"), torch.tensor([0, 4, 4, 9])
    weight = normal(rng, 3, 12, 8, dtype="float64")
    experts, activation = (CATALOGUE[op].reference for op in ("grouped_gemm", "activation.gated"))
    behind = GatedActivationRequest(width=6, dtype="float64", clamp=clamp)
    want = activation(behind)(experts(plain, weight=weight)(x, offsets))
    got = experts(gated, weight=weight)(x, offsets)
    assert_within("grouped_gemm", got, want)


def test_dispatch_counts_its_bytes_and_refuses_what_does_not_fit(rng: torch.Generator) -> None:
    permute = MoeDispatchRequest(
        kind="permute", num_experts=6, top_k=2, hidden_size=8, dtype="bfloat16"
    )
    dispatch = CATALOGUE["moe_dispatch"]
    x, ids = normal(rng, 5, 8, dtype="bfloat16"), torch.zeros(5, 2, dtype=torch.int32)
    rows, offsets, source = dispatch.reference(permute)(x, ids)
    moved = sum(t.nbytes for t in (x, ids, rows, offsets, source))
    assert dispatch.bytes_moved(permute, 5) == moved
    combine = dataclasses.replace(permute, kind="combine")
    weights = torch.zeros(5, 2)
    out = dispatch.reference(combine)(rows, source, weights)
    assert dispatch.bytes_moved(combine, 5) == sum(t.nbytes for t in (rows, source, weights, out))
    with pytest.raises(ValueError, match="ids from -1 to 5, found 0 to 6"):
        dispatch.reference(permute)(x, ids.index_fill(1, torch.tensor([0]), 6))
    with pytest.raises(ValueError, match="a source for each of 10 rows, found 9"):
        dispatch.reference(combine)(rows, source[:9], weights)
    with pytest.raises(RequestError, match="top_k <= num_experts 6"):
        dataclasses.replace(permute, top_k=7)
    with pytest.raises(RequestError, match="kind one of"):
        dataclasses.replace(permute, kind="sort")
