"""Routed models: logits and tokens of unrouted ones, every product and attention counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hal.dispatch_spy import DispatchSpy
from hal.integrations.call_places import LinearPlace
from hal.integrations.transformers import RoutedModel, route
from routed_models import MODELS, NEEDS_WAIVER, VOCAB, attention_waivers, make_model, registry

DIFFERENCE = 1e-5  # of the largest logit
# Implementations that need no compilation, which would take most of the time of these tests; the
# choice of selection has tests of its own.
PLAIN = {
    "gemm": "cpu.gemm.linear_fp32",
    "embedding": "cpu.embedding.index_select",
    "norm.rms": "reference.norm.rms",
}
LAYER_NORMS = frozenset({"Falcon", "Bloom", "GPT2", "Bert", "ViT"})


def routed_tiny(name: str, model: Any, use: Mapping[str, str] = PLAIN) -> RoutedModel:
    waivers = attention_waivers() if name in NEEDS_WAIVER else None
    if name == "ViT":  # has no table, and a choice for an op that is not there is an error
        use = {op: choice for op, choice in use.items() if op != "embedding"}
    if name in LAYER_NORMS:
        use = {op: choice for op, choice in use.items() if op != "norm.rms"}
    return route(model, waivers=waivers, use=use, max_tokens=128, registry=registry())


def inputs_of(model: Any, name: str) -> dict[str, torch.Tensor]:
    if name == "ViT":
        return {"pixel_values": torch.randn(3, 3, 16, 16)}
    ids = torch.randint(3, VOCAB, (3, 17))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    if name == "T5":
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :6]}
    return {"input_ids": ids, "attention_mask": mask}


def result(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        value: torch.Tensor = model(**inputs)[0]
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        value = value[inputs["attention_mask"].bool()]
    return value.clone()


def largest(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def calls(routed: RoutedModel) -> int:
    return sum(row.calls for row in routed.counts())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_unrouted_model(name: str) -> None:
    model = make_model(name)
    inputs = inputs_of(model, name)
    plain = {k: v for k, v in inputs.items() if k != "attention_mask"}
    want, want_plain = result(model, inputs), result(model, plain)
    with routed_tiny(name, model) as routed:
        assert calls(routed) == 0  # the rehearsal is not counted
        spy = DispatchSpy()
        routed._router.marks.spy = spy
        with spy:
            got = result(model, inputs)
        routed._router.marks.spy = None
        got_plain = result(model, plain)
        assert not spy.escaped
        assert spy.num_tracked > 0
        assert calls(routed) > 0
    assert largest(got, want) <= DIFFERENCE
    assert largest(got_plain, want_plain) <= DIFFERENCE
    assert torch.equal(result(model, inputs), want)  # undone: to the bit


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("Qwen3", "dynamic"),
        ("Qwen3", "static"),
        ("Qwen2Moe", "dynamic"),
        ("GptOss", "dynamic"),
        ("Gemma3Text", "static"),
        ("DeepseekV32", "dynamic"),
        ("GlmMoeDsa", "static"),
    ],
)
def test_generated_tokens_are_the_same(name: str, cache: str) -> None:
    model = make_model(name)
    inputs = inputs_of(model, name)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    options["cache_implementation"] = cache
    want = model.generate(**inputs, **options)
    with routed_tiny(name, model) as routed:
        got = model.generate(**inputs, **options)
        phases = Counter(row.phase for row in routed.counts() if row.calls)
    assert torch.equal(got, want)
    assert phases["prefill"]
    assert phases["decode"]


def test_counts_are_calls() -> None:
    model = make_model("Llama")
    with routed_tiny("Llama", model) as routed:
        for _ in range(3):
            result(model, inputs_of(model, "Llama"))
        by_op = Counter[str]()
        for row in routed.counts():
            by_op[row.op] += row.calls
    # 7 linears in each of 2 layers and the head; one table; one attention a layer; two norms a
    # layer and the last.
    assert by_op == {
        "gemm": 3 * 15,
        "embedding": 3,
        "dense_attention": 3 * 2,
        "norm.rms": 3 * 5,
    }


def test_the_plan_names_every_call_site_and_is_stable() -> None:
    plans = []
    for _ in range(2):
        with routed_tiny("Qwen2Moe", make_model("Qwen2Moe"), use={}) as routed:
            plans.append(routed.plan)
    assert plans[0].hash == plans[1].hash
    sites = {op.site.site: op.site.request.op for op in plans[0].ops}
    assert sites["model.layers.*.self_attn.q_proj"] == "gemm"
    assert sites["model.layers.*.self_attn.attention"] == "dense_attention"
    assert sites["model.layers.*.mlp.experts.up"] == "grouped_gemm"
    assert sites["model.layers.*.mlp.gate.linear"] == "gemm"
    assert sites["model.embed_tokens"] == "embedding"
    assert all(op.choice.name.startswith("cpu.") for op in plans[0].ops)


def test_the_indexer_of_sparse_models_is_planned_as_products() -> None:
    with routed_tiny("DeepseekV32", make_model("DeepseekV32")) as routed:
        sites = {op.site.site: op.site.request for op in routed.plan.ops}
        notes = " ".join(routed.plan.notes)
    product: Any = sites["model.layers.*.self_attn.indexer.matmul"]
    assert (product.op, product.k, product.n) == ("batched_gemm", 16, 0)
    attention: Any = sites["model.layers.*.self_attn.attention.masked"]
    assert attention.list_width == 6
    assert "products of two activations" in notes


def test_a_router_in_float32_of_a_bfloat16_model_is_converted_once() -> None:
    model = make_model("DeepseekV3").to(torch.bfloat16)
    inputs = inputs_of(model, "DeepseekV3")
    want = result(model, inputs).float()
    with route(model, strict=False, max_tokens=128, registry=registry()) as routed:
        sites: dict[str, Any] = {op.site.site: op.site.request for op in routed.plan.ops}
        assert sites["model.layers.*.mlp.gate.linear"].dtype == "float32"
        assert sites["model.layers.*.self_attn.o_proj"].dtype == "bfloat16"
        routers = [p for p in routed._router.book.free.values() if isinstance(p, LinearPlace)]
        assert routers
        assert all(p.source is not None and p.source.dtype == torch.bfloat16 for p in routers)
        got = result(model, inputs).float()
    assert largest(got, want) < 0.1  # of two bfloat16 models; a router may pick another expert


def test_an_audit_finds_the_declared_leaves() -> None:
    with routed_tiny("Llama", make_model("Llama")) as routed:
        report = routed.audit()
        again = routed.audit({"input_ids": torch.randint(3, VOCAB, (1, 4))})
    assert not report.open_findings()
    states = Counter(row.leaf.state for row in report.rows if row.op == "dense_attention")
    assert states["seen"]
    assert not states["other"]
    assert report.plan_hash == routed.plan.hash
    assert sum(row.calls for row in report.rows) == sum(w.calls for w in report.coverage.values())
    assert 0 < sum(row.calls for row in again.rows) < sum(row.calls for row in report.rows)
