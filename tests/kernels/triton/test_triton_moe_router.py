"""The Triton choice of experts: the same ids as the reference, weights against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hal_kernels.moe_router.triton as triton_router
from gpu_devices import gpu
from hal.ops.moe_router import MoeRouterRequest, reference

SHAPES = {
    "e8-k2": {"num_experts": 8, "top_k": 2},
    "e60-k8": {"num_experts": 60, "top_k": 8},
    "e160-k16": {"num_experts": 160, "top_k": 16, "route_scale": 2.5},
    "all": {"num_experts": 5, "top_k": 5, "normalizes": False},
    "groups": {"num_experts": 64, "num_groups": 8, "num_groups_picked": 4, "top_k": 8},
    "pairs": {"num_experts": 16, "num_groups": 8, "num_groups_picked": 3, "top_k": 6},
    # More than the lanes of a warp load at once: groups within such a part, and across two.
    "e256-g8": {"num_experts": 256, "num_groups": 8, "num_groups_picked": 4, "top_k": 8},
    "e512-g2": {"num_experts": 512, "num_groups": 2, "num_groups_picked": 1, "top_k": 6},
}


def spread_logits(tokens: int, experts: int) -> torch.Tensor:
    """Logits in steps of 1/16: equal ones are equal scores, others differ by far more than
    rounding. None is the negative of another: the sum of such two sigmoids is 1 for any two."""
    return torch.randint(0, 65, (tokens, experts)) / 16


def assert_as_reference(
    request: MoeRouterRequest,
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    arch: str = "sm_90",
) -> None:
    kernel = triton_router.bind(request, gpu(arch), bias=bias)
    weights, ids = kernel(logits)
    exact, want = reference(request, bias=None if bias is None else bias.double())(logits.double())
    assert weights.dtype == torch.float32
    assert torch.equal(ids, want)
    assert ((weights.double() - exact).abs() <= 3e-6 * exact.abs() + 1e-12).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("fields", list(SHAPES.values()), ids=list(SHAPES))
def test_ties_go_to_the_lower_expert(scoring: Any, fields: dict[str, Any]) -> None:
    request = MoeRouterRequest(scoring=scoring, **fields)
    for tokens, arch in ((0, "sm_90"), (1, "sm_90"), (6, "sm_90"), (9, "gfx942"), (3, "gfx1100")):
        assert_as_reference(request, spread_logits(tokens, request.num_experts), arch=arch)
    assert_as_reference(request, torch.zeros(2, request.num_experts))


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(
    "fields",
    [SHAPES["e60-k8"], SHAPES["groups"], SHAPES["e256-g8"]],
    ids=["plain", "groups", "e256-g8"],
)
def test_bias_chooses_and_does_not_weigh(scoring: Any, fields: dict[str, Any]) -> None:
    request = MoeRouterRequest(scoring=scoring, has_bias=True, **fields)
    # Every score has a partner of the same logit and bias: those ties are exact.
    half = request.num_experts // 2
    logits = torch.cat((spread_logits(5, half),) * 2, dim=1)
    bias = torch.cat((torch.randperm(half) / 7.0,) * 2).float()
    assert_as_reference(request, logits, bias)


def test_more_tokens_than_a_program_has() -> None:
    request = MoeRouterRequest(scoring="softmax", num_experts=16, top_k=4)
    assert_as_reference(request, spread_logits(100, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_strided_logits(dtype: str) -> None:
    request = MoeRouterRequest(scoring="softmax", num_experts=20, top_k=4, dtype=dtype)
    wide = spread_logits(4, 30).to(getattr(torch, dtype))
    assert_as_reference(request, wide[:, 5:25])


def test_extreme_logits_and_what_is_not_a_number() -> None:
    request = MoeRouterRequest(scoring="sqrt_softplus", num_experts=6, top_k=6, normalizes=False)
    assert_as_reference(request, torch.tensor([[-80.0, -30.0, -10.0, 0.0, 25.0, 3e4]]))
    sigmoid = MoeRouterRequest(scoring="sigmoid", num_experts=4, top_k=3, normalizes=False)
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, nan, -inf, nan], [-inf, inf, -inf, -inf], [-inf] * 4])
    weights, ids = triton_router.bind(sigmoid, gpu("sm_90"))(logits)
    exact, want = reference(sigmoid)(logits)
    assert torch.equal(ids, want)
    assert torch.allclose(weights, exact, equal_nan=True)


def test_hash_table() -> None:
    request = MoeRouterRequest(scoring="hash", num_experts=24, top_k=6, route_scale=1.5)
    table = torch.stack([torch.randperm(24)[:6] for _ in range(50)])
    token_ids = torch.randint(0, 50, (19,))
    logits = torch.randn(19, 24) * 3
    kernel = triton_router.bind(request, gpu("sm_90"), expert_table=table)
    weights, ids = kernel(logits, token_ids)
    exact, want = reference(request, expert_table=table)(logits.double(), token_ids)
    assert torch.equal(ids, want)
    assert ((weights.double() - exact).abs() <= 3e-6 * exact).all()
    assert kernel(logits[:0], token_ids[:0])[0].shape == (0, 6)
    with pytest.raises(ValueError, match="required experts 0 to 23"):
        triton_router.bind(request, gpu("sm_90"), expert_table=table + 1)
    with pytest.raises(ValueError, match="required token ids"):
        kernel(logits)
