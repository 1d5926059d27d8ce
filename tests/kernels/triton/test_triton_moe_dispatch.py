"""The Triton dispatch to experts: the reference's order exactly, its sums in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import hal_kernels.moe_dispatch.triton as triton_dispatch
from gpu_devices import gpu
from hal.ops import CATALOGUE
from hal.ops.moe_dispatch import MoeDispatchRequest, reference
from hal_kernels.moe_dispatch.triton_limits import not_supported_reasons
from hal_kernels.moe_dispatch.triton_variants import FEW_CHOICES
from read_backs import no_reading_back

STEP = CATALOGUE["moe_dispatch"].largest_errors
CASES = {
    "one-token": (1, 8, 3, 40),
    "few": (9, 5, 2, 40),
    "wide": (3, 4, 4, 1500),
    "one-expert": (7, 1, 1, 16),
    "none": (0, 6, 2, 24),
    # More choices than the first form reads at once.
    "many": (FEW_CHOICES // 9 + 3, 11, 9, 8),
}


def random_ids(tokens: int, experts: int, top_k: int, *, is_partial: bool) -> torch.Tensor:
    """Different experts of a token; those of other ranks are -1."""
    order = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k].int()
    return torch.where(order >= (experts + 1) // 2, -1, order) if is_partial else order


@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "partial"])
def test_rows_by_expert_and_back(
    tokens: int, experts: int, top_k: int, hidden: int, is_partial: bool
) -> None:
    ids = random_ids(tokens, experts, top_k, is_partial=is_partial)
    fields = {"num_experts": experts, "top_k": top_k, "hidden_size": hidden}
    for dtype, step in list(STEP.items())[: 1 if tokens > 9 else None]:
        permute = MoeDispatchRequest(kind="permute", dtype=dtype, **fields)
        x = torch.randn(tokens, hidden + 8).to(getattr(torch, dtype))[:, :hidden]
        found = triton_dispatch.bind(permute, gpu("sm_90"))(x, ids)
        for got, want in zip(found, reference(permute)(x, ids), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        combine = MoeDispatchRequest(kind="combine", dtype=dtype, **fields)
        rows, _, source = found
        weights = torch.rand(tokens, top_k)
        weights[ids < 0] = float("nan")  # of a choice that has no row here
        y = triton_dispatch.bind(combine, gpu("sm_90"))(rows, source, weights)
        exact = reference(combine)(rows.double(), source, weights.nan_to_num().double())
        total = x.double().abs() * weights.nan_to_num().double().sum(dim=1, keepdim=True)
        assert y.dtype == x.dtype
        # Half a step of a value, of float16's denormals at least, and the order of the sum.
        bound = step * exact.abs() + 2.0**-25 + top_k * 2.0**-23 * total
        assert ((y.double() - exact).abs() <= bound).all()


def test_what_is_refused() -> None:
    fields = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "dtype": "float32"}
    permute = MoeDispatchRequest(kind="permute", **fields)
    combine = MoeDispatchRequest(kind="combine", **fields)
    for wrong in (-2, 4):
        ids = torch.tensor([[0, wrong]], dtype=torch.int32)
        with pytest.raises(ValueError, match="required ids from -1 to 3"):
            triton_dispatch.bind(permute, gpu("sm_90"))(torch.ones(1, 16), ids)
    with pytest.raises(ValueError, match="required a source for each of 2 rows"):
        triton_dispatch.bind(combine, gpu("sm_90"))(
            torch.ones(2, 16), torch.zeros(1, dtype=torch.int32), torch.ones(1, 2)
        )


@pytest.mark.parametrize(("tokens", "experts", "top_k", "hidden"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("is_partial", [False, True], ids=["all", "partial"])
def test_of_a_captured_graph_nothing_is_read_back(
    tokens: int, experts: int, top_k: int, hidden: int, is_partial: bool
) -> None:
    ids = random_ids(tokens, experts, top_k, is_partial=is_partial)
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    permute, combine = (
        MoeDispatchRequest(
            kind=kind, num_experts=experts, top_k=top_k, hidden_size=hidden, dtype="float32",
            graph_mode="graph",
        )
        for kind in ("permute", "combine")
    )  # fmt: skip
    for request in (permute, combine):
        assert not not_supported_reasons(request, gpu("sm_90"))
    spread = triton_dispatch.bind(permute, gpu("sm_90"))
    together = triton_dispatch.bind(combine, gpu("sm_90"))
    with no_reading_back():
        rows, offsets, source = spread(x, ids)
    count = int(offsets[-1])
    rows[count:] = float("nan")  # as a product per expert leaves what is no expert's
    with no_reading_back():
        y = together(rows, source, weights)
    eager = triton_dispatch.bind(dataclasses.replace(permute, graph_mode="eager"), gpu("sm_90"))
    with pytest.raises(AssertionError, match="reads a tensor back"), no_reading_back():
        eager(x, ids)
    golden, exact_offsets, exact_source = reference(permute)(x, ids)
    assert rows.shape == golden.shape == (tokens * top_k, hidden)
    assert torch.equal(rows[:count], golden[:count])
    assert torch.equal(offsets, exact_offsets)
    assert torch.equal(source, exact_source)
    exact = reference(combine)(golden.double(), exact_source, weights.double())
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= 1e-5 * (1.0 + exact.abs())).all()


def test_the_form_of_a_captured_graph_is_of_the_same_rows() -> None:
    ids = random_ids(6, 8, 3, is_partial=True)
    x, weights = torch.randn(6, 20), torch.rand(6, 3)
    found = []
    for graph_mode in ("eager", "graph"):
        fields: Any = {"num_experts": 8, "top_k": 3, "hidden_size": 20, "dtype": "float32"}
        permute = MoeDispatchRequest(kind="permute", graph_mode=graph_mode, **fields)
        combine = MoeDispatchRequest(kind="combine", graph_mode=graph_mode, **fields)
        rows, offsets, source = triton_dispatch.bind(permute, gpu("sm_90"))(x, ids)
        y = triton_dispatch.bind(combine, gpu("sm_90"))(rows, source, weights)
        found.append((rows, offsets, source, y))
    eager, graph = found
    count = len(eager[0])
    assert count < len(graph[0])
    assert torch.equal(eager[0], graph[0][:count])
    assert torch.equal(eager[1], graph[1])
    assert torch.equal(eager[2], graph[2][:count])
    assert (graph[2][count:] == -1).all()
    assert torch.equal(eager[3], graph[3])


def test_an_id_of_no_expert_is_seen_in_a_captured_graph_too() -> None:
    fields = {"num_experts": 4, "top_k": 2, "hidden_size": 16, "dtype": "bfloat16"}
    permute = MoeDispatchRequest(kind="permute", graph_mode="graph", **fields)
    for wrong in (-2, 4):
        ids = torch.tensor([[0, wrong], [0, 1]], dtype=torch.int32)
        x = torch.ones(2, 16).bfloat16()
        rows, offsets, source = triton_dispatch.bind(permute, gpu("sm_90"))(x, ids)
        assert offsets.tolist() == [0, 2, 3, 3, 3]
        assert source.tolist() == [0, 2, 3, -3]
        assert rows[0].isnan().all()
        assert torch.equal(rows[1:3], x)


@pytest.mark.parametrize("count", [4, FEW_CHOICES // 2 + 30])
def test_a_token_with_an_id_of_no_expert_is_nan_in_a_captured_graph(count: int) -> None:
    """Whether or not others of its ids have rows, in one step of the ids and in several."""
    fields: Any = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "graph_mode": "graph"}
    ids = random_ids(count, 4, 2, is_partial=True)
    ids[:4] = torch.tensor([[9, -1], [7, -2], [1, 9], [-1, -1]])
    is_foreign = torch.rand(count, 2) < 0.2
    is_foreign[:4] = False
    ids = torch.where(is_foreign, 4, ids).to(torch.int32)[torch.randperm(count)]
    x, weights = torch.randn(count, 8), torch.rand(count, 2)
    permute = MoeDispatchRequest(kind="permute", dtype="float32", **fields)
    combine = MoeDispatchRequest(kind="combine", dtype="float32", **fields)
    rows, offsets, source = triton_dispatch.bind(permute, gpu("sm_90"))(x, ids)
    rows[int(offsets[-1]) :] = float("nan")
    y = triton_dispatch.bind(combine, gpu("sm_90"))(rows, source, weights)
    is_broken = ((ids < -1) | (ids >= 4)).any(dim=1)
    assert y[is_broken].isnan().all()
    sums = torch.where(ids >= 0, weights, 0.0).sum(dim=1, keepdim=True)
    exact = (x.double() * sums.double())[~is_broken]
    assert ((y[~is_broken].double() - exact).abs() <= 1e-5 * (1.0 + exact.abs())).all()
    # A sum made in another way passes over them: see the op's reference.
    assert ((source >= -1).sum() + ((ids < -1) | (ids >= 4)).sum()) == ids.numel()
