"""The Triton dispatch to experts: the reference's order exactly, its sums in float64."""

from __future__ import annotations

import pytest
import torch

import hal_kernels.moe_dispatch.triton as triton_dispatch
from gpu_devices import gpu
from hal.ops.moe_dispatch import MoeDispatchRequest, reference
from hal_kernels.moe_dispatch.triton_limits import not_supported_reasons
from hal_kernels.moe_dispatch.triton_variants import FEW_CHOICES

STEP = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-11}
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
    captured = MoeDispatchRequest(kind="permute", graph_mode="graph", **fields)
    assert [r.what for r in not_supported_reasons(captured, gpu("sm_90"))] == [
        "moe_dispatch.places: graph_mode"
    ]
