"""Norms of routed models: told by what they compute, bound where an op means it, else named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hal.errors import RoutingError
from hal.integrations.norm_places import LAYER, RMS, RMS_PLUS_ONE, NormPlace, find_norm
from hal.integrations.transformers import RoutedModel, route
from routed_models import VOCAB, make_model, registry

DIFFERENCE = 1e-5  # of the largest logit
PLAIN = {"gemm": "cpu.gemm.linear_fp32", "embedding": "cpu.embedding.index_select"}


def randomised(module: Any) -> Any:
    """Its vectors drawn anew: no norm's weight is one, no bias zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.4)
    return module.eval()


WIDTH = 48
NORMS: dict[str, tuple[Any, str, float]] = {
    "Llama": (lambda: LlamaRMSNorm(WIDTH, eps=1e-5), RMS, 1e-5),
    "Gemma": (lambda: Gemma3RMSNorm(WIDTH, eps=1e-6), RMS_PLUS_ONE, 1e-6),
    "T5": (lambda: T5LayerNorm(WIDTH, eps=1e-6), RMS, 1e-6),
    "torch's": (lambda: nn.RMSNorm(WIDTH, eps=1e-3), RMS, 1e-3),
    "torch's own eps": (lambda: nn.RMSNorm(WIDTH), RMS, torch.finfo(torch.float32).eps),
    "layer": (lambda: nn.LayerNorm(WIDTH, eps=1e-12), LAYER, 1e-12),
    "layer without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), LAYER, 1e-5),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_told_by_what_it_computes(name: str) -> None:
    make, form, eps = NORMS[name]
    for dtype in (torch.float32, torch.bfloat16):
        found = find_norm("n", randomised(make()).to(dtype))
        if form == RMS_PLUS_ONE and dtype is torch.bfloat16:
            assert found == "1 + its weight is no bfloat16, and would be rounded"
            continue
        assert isinstance(found, NormPlace), found
        assert found.form == form
        if name != "torch's own eps":
            assert found.eps == eps


def test_one_more_than_a_weight_is_taken_where_it_is_exact() -> None:
    """As in a model whose norms have not been trained: 1 + 0, or eighths."""
    norm = Gemma3RMSNorm(WIDTH, eps=1e-6).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.randint(-4, 5, (WIDTH,)) / 8)
    found = find_norm("n", norm)
    assert isinstance(found, NormPlace), found
    assert found.form == RMS_PLUS_ONE


class OddNorm(nn.Module):
    """Looks like a root-mean-square norm. kind: how it differs from one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(WIDTH))
        self.eps = 1e-3
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        if self.kind == "eps outside the root":
            return x / (mean.sqrt() + self.eps) * self.weight
        if self.kind == "another eps":
            return x * torch.rsqrt(mean + 1e-5) * self.weight
        if self.kind == "two plus weight":
            return x * torch.rsqrt(mean + self.eps) * (2 + self.weight)
        if self.kind == "over all rows":
            return x * torch.rsqrt(x.square().mean() + self.eps) * self.weight
        if self.kind == "sum of squares":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps) * self.weight
        if self.kind == "another dtype":
            return (x * torch.rsqrt(mean + self.eps) * self.weight).double()
        return x * torch.rsqrt(mean + self.eps) * self.weight


class GatedNorm(OddNorm):
    """Takes a gate as well."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]  # as gated norms do
        return super().forward(x) if gate is None else super().forward(x) * gate


@pytest.mark.parametrize(
    "kind",
    [
        "eps outside the root",
        "another eps",
        "two plus weight",
        "over all rows",
        "sum of squares",
        "another dtype",
    ],
)
def test_what_only_looks_like_a_norm_is_none(kind: str) -> None:
    assert isinstance(find_norm("n", OddNorm("")), NormPlace)
    found = find_norm("n", OddNorm(kind))
    assert isinstance(found, str)
    assert "neither" in found


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "weight of its width"),
        (lambda: nn.LayerNorm((4, WIDTH)), "weight of its width"),
        (lambda: nn.BatchNorm1d(WIDTH), "weight of its width"),
        (lambda: GatedNorm(""), "more than one tensor"),
    ],
)
def test_other_norms_have_a_reason(module: Any, reason: str) -> None:
    found = find_norm("n", module())
    assert isinstance(found, str)
    assert reason in found


def test_what_is_no_norm_is_not_named() -> None:
    assert find_norm("n", nn.Linear(3, 3)) is None
    assert find_norm("n", nn.Sequential()) is None


def routed(model: Any, **options: Any) -> RoutedModel:
    use = dict(PLAIN)
    if any("RMSNorm" in type(module).__name__ for module in model.modules()):
        use["norm.rms"] = "reference.norm.rms"
    return route(model, use=use, max_tokens=64, registry=registry(), **options)


@pytest.mark.parametrize(
    ("name", "op", "count"),
    [("Llama", "norm.rms", 5), ("Gemma3Text", "norm.rms", 13), ("Bert", "layer_norm", 5)],
)
def test_every_norm_is_counted_and_logits_stay(name: str, op: str, count: int) -> None:
    model = randomised(make_model(name, seed=int(torch.randint(1 << 30, ()))))
    ids = torch.randint(3, VOCAB, (2, 9))
    with torch.inference_mode():
        want = model(ids)[0].clone()
        with routed(model) as through:
            got = model(ids)[0].clone()
            calls = {row.site: row.calls for row in through.counts() if row.op == op and row.calls}
            assert not [note for note in through.plan.notes if "norms" in note]
        assert torch.equal(model(ids)[0], want)
    assert float((got - want).abs().max() / want.abs().max()) <= DIFFERENCE
    assert sum(calls.values()) == count


def test_the_chosen_kernel_has_the_same_logits() -> None:
    """What selection picks by itself for norms, on this machine."""
    model = randomised(make_model("Gemma3Text"))
    ids = torch.randint(3, VOCAB, (2, 9))
    with torch.inference_mode():
        want = model(ids)[0].clone()
        with route(model, use=PLAIN, max_tokens=64, registry=registry()) as through:
            got = model(ids)[0].clone()
            names = {op.choice.name for op in through.plan.ops if op.site.request.op == "norm.rms"}
    assert names
    assert not any(name.startswith("reference") for name in names)
    assert float((got - want).abs().max() / want.abs().max()) <= DIFFERENCE


def test_a_norm_whose_weight_is_of_another_dtype_is_left_and_named() -> None:
    model = randomised(make_model("Llama"))
    model.model.norm.weight.data = model.model.norm.weight.data.bfloat16()
    with routed(model) as through:
        sites = {op.site.site for op in through.plan.ops if op.site.request.op == "norm.rms"}
        notes = " ".join(through.plan.notes)
    assert "model.norm" not in sites
    assert "model.layers.*.input_layernorm" in sites
    assert "model.norm (LlamaRMSNorm): its weight is bfloat16" in notes


def test_a_changed_weight_and_training_are_refused() -> None:
    model = randomised(make_model("Llama"))
    ids = torch.randint(3, VOCAB, (1, 5))
    with routed(model), torch.no_grad():
        model.model.norm.weight.mul_(2)
        with pytest.raises(RoutingError, match=r"model\.norm"):
            model(ids)
    with routed(model), torch.no_grad():
        model.model.norm.train()
        with pytest.raises(RoutingError, match="evaluation mode"):
            model(ids)
        model.model.norm.eval()
        with pytest.raises(RoutingError, match="as in the rehearsal"):
            model.model.norm(torch.randn(3, 7))
