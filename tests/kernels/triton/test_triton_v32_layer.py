"""A V3.2-like layer through Triton kernels only: latent attention over FP8 rows, an indexer that
chooses keys, FP8 products with block scales, routed and shared experts.

The calls are those that the engine plans for the family; the interpreter runs the kernels. Against
the reference ops in float64, and against transformers' layer with the checkpoint's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32DecoderLayer,
    DeepseekV32RotaryEmbedding,
)

import v32_layer
from hal.binding import BoundOps
from hal.ops import CATALOGUE
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import KV_FORMATS
from hal.plan import Plan
from hal.planner import PlanInputs, create_plan
from hal.waivers import WaiverBook
from hal_engine.config import load_model_config
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.precision import resolve_precision
from interpreted_backend import (
    CheckedCalls,
    InterpretedRegistry,
    PlainTorchOps,
    computed,
    interpreted_device,
    rms_error,
)
from oracle_modules import causal_mask
from v32_layer import CONFIG, HIDDEN, MATRICES, Rows, Step, V32Layer

BLOCK = 64
# Ends of the chunks of a prompt, then how many tokens one by one. The references compute the first
# of them where the interpreter would take long, so that there are more keys than are chosen.
SHORT = ((64, 69), 1)
LONG = ((30, 70, 150), 3)
ROUTES = [
    pytest.param(SHORT, True, id="short"),
    pytest.param(LONG, False, id="long", marks=pytest.mark.long),
]
Route = tuple[tuple[int, ...], int]
# Root mean square of the error over that of the result. Activations and cached rows are rounded to
# e4m3 (2**-4 each), and what bfloat16 loses between ops falls to the other side of such steps.
TOLERANCE = 2.0**-3.5
# Of the plan, what is around the layers.
UNASKED = {"embedding", "sample.top_k_top_p"}


@dataclass(frozen=True)
class Model:
    """A layer's parameters as the checkpoint keeps them, and transformers' layer with them."""

    parameters: dict[str, torch.Tensor]
    oracle: Any
    config: DeepseekV32Config


@pytest.fixture(scope="module")
def model() -> Model:
    plain = {k: v for k, v in CONFIG.items() if k not in ("quantization_config", "torch_dtype")}
    config = DeepseekV32Config(**plain)
    config._attn_implementation = "eager"
    layer = DeepseekV32DecoderLayer(config, 0)
    parameters: dict[str, torch.Tensor] = {}
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if name in MATRICES:
            drawn = torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5
            parameters[name] = v32_layer.stored(drawn, is_fp8=MATRICES[name])
        else:
            drawn = torch.randn(tensor.shape) * 0.1 + (0.0 if "bias" in name else 1.0)
            parameters[name] = drawn.bfloat16().float()
    layer.load_state_dict(parameters)
    return Model(parameters, layer.double().eval(), config)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = load_model_config(v32_layer.write_config(tmp_path_factory.mktemp("v32")))
    device, registry = interpreted_device(), InterpretedRegistry()
    precision = resolve_precision(config, "auto", "auto", device.features)
    limits = StepLimits(max_num_batched_tokens=128, max_num_seqs=4, block_size=BLOCK)
    inputs = PlanInputs(
        sites=model_sites(config, precision, limits),
        device=device,
        policy=registry.policy(device),
        candidates=registry.candidates,
        waivers=WaiverBook(),
    )
    return create_plan(
        inputs,
        model={},
        settings={},
        kv_bytes_per_token=0,
        kv_copies=1,
        notes=[],
        versions={},
        world_size=1,
        steps=[],
    )


@dataclass
class Choices:
    """What another run of the same steps chose, in the order of the calls."""

    lists: list[torch.Tensor]
    experts: list[torch.Tensor]


class References:
    """Binds the reference of each call site of a plan, with the choices of entries and of experts
    given: two nearly equal candidates would otherwise make two different layers."""

    def __init__(self, plan: Plan, choices: Choices | None = None) -> None:
        self._requests = {
            (name, op.site.request.phase): op.site.request
            for op in plan.ops
            for name in op.site.names()
        }
        self._choices = choices
        if choices is not None:
            self._lists, self._experts = iter(choices.lists), iter(choices.experts)

    def bind(self, site: str, phase: str = "any", **static: Any) -> Callable[..., Any]:
        request: Any = self._requests[site, phase]
        golden = CATALOGUE[request.op].reference(request, **static)
        if self._choices is not None and site.endswith("indexer.top_k"):
            return lambda n, *args: next(self._lists)
        if self._choices is not None and site.endswith(".router"):
            return lambda n, logits: weighted(logits, next(self._experts))
        return lambda n, *args: golden(*args)


def weighted(logits: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the router says of these experts."""
    scores = logits.sigmoid().gather(1, experts.long())
    scale: float = CONFIG["routed_scaling_factor"]
    return scores / scores.sum(1, keepdim=True) * scale, experts


def caches(count: int, dtype: str) -> torch.Tensor:
    """Pages in which whatever nobody wrote is NaN."""
    return torch.full((count, KV_FORMATS[dtype].page_bytes(BLOCK)), 0xFF, dtype=torch.uint8)


def run(
    layers: Sequence[V32Layer], hidden: torch.Tensor, route: Route, table: torch.Tensor
) -> list[Step]:
    """Every step of one sequence whose pages are those of the table, with a layer for each."""
    kv_cache, index_cache = caches(8, "fp8_656"), caches(8, "fp8_132")
    steps, first = [], 0
    for number, (layer, end) in enumerate(zip(layers, ends_of(route), strict=True)):
        positions = torch.arange(first, end)
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=table[None],
            max_query_len=end - first,
            max_seq_len=end,
        )
        rows = Rows(
            phase="prefill" if number < len(route[0]) else "decode",
            x=hidden[first:end].clone(),  # the sum with the residual is written into it
            positions=positions,
            slots=table.long()[positions // BLOCK] * BLOCK + positions % BLOCK,
            meta=meta,
        )
        steps.append(layer(rows, kv_cache, index_cache))
        first = end
    return steps


def ends_of(route: Route) -> list[int]:
    chunks, decoded = route
    return [*chunks, *(chunks[-1] + i + 1 for i in range(decoded))]


def whole(steps: list[Step]) -> torch.Tensor:
    return torch.cat([step.out for step in steps])


def test_every_op_of_the_plan_is_a_triton_kernel(plan: Plan) -> None:
    names = {op.choice.name for op in plan.ops}
    assert names == {f"test.{op.site.request.op}.triton" for op in plan.ops}
    assert {op.site.request.op for op in plan.ops} >= {
        *("mla_attention", "index_logits", "index_top_k", "kv_write", "quantize", "layer_norm"),
        *("gemm", "grouped_gemm", "moe_router", "moe_dispatch", "norm.rms", "rope"),
    }
    gated = [op.site for op in plan.ops if op.site.site.endswith("shared.gate_up_proj")]
    assert {getattr(site.request, "epilogue", "") for site in gated} == {"silu_gated"}
    formats = {getattr(op.site.request, "weight_format", None) for op in plan.ops}
    assert "fp8_block128_a8" in {form.name for form in formats if form is not None}


@pytest.mark.parametrize(("route", "has_prefix"), ROUTES)
def test_chunks_and_decode_are_the_references_and_transformers(
    plan: Plan, model: Model, route: Route, has_prefix: bool
) -> None:
    length, count = ends_of(route)[-1], len(ends_of(route))
    hidden = torch.randn(length, HIDDEN).bfloat16()
    table = torch.randperm(8)[: -(-length // BLOCK)].to(torch.int32)
    checked = CheckedCalls()  # each call by itself, within its op's tolerance
    ops = BoundOps(plan, observe=checked.observe)
    layer = V32Layer(ops, model.parameters, torch.bfloat16)
    layers = [layer] * count
    if has_prefix:
        layers[0] = V32Layer(References(plan), model.parameters, torch.bfloat16)
    spy = PlainTorchOps()
    watched = [Watched(one, spy) if one is layer else one for one in layers]
    with torch.inference_mode():
        found = run(watched, hidden, route, table)
    # The two sums that no op has; the visible entries and the offsets of heads are counted so too.
    assert computed(spy).keys() <= {"aten::mul", "aten::add"}
    assert spy.counts["aten::mul"] == count - has_prefix
    assert spy.num_launches > 30 * (count - has_prefix)
    assert set(checked.seen) == {o.site.request.label for o in plan.ops} - UNASKED
    choices = Choices([s.lists for s in found], [s.experts for s in found])
    golden = V32Layer(References(plan, choices), model.parameters, torch.float64)
    exact = run([golden] * count, hidden.double(), route, table)
    check_choices(found, exact)
    with torch.inference_mode():
        expected = transformers_layer(model, hidden.double(), choices)
    first = route[0][0] if has_prefix else 0
    same = V32Layer(References(plan, choices), model.parameters, torch.bfloat16)
    with torch.inference_mode():
        rounded = run([same] * count, hidden, route, table)
    got, want, plain = (whole(steps)[first:] for steps in (found, exact, rounded))
    # As far from float64 as the references in bfloat16 are, which is what the formats cost.
    assert rms_error(got, want) <= min(TOLERANCE, 1.5 * rms_error(plain, want))
    assert rms_error(got, expected[first:]) <= TOLERANCE


@dataclass
class Watched:
    """A layer whose torch ops are counted."""

    layer: V32Layer
    spy: PlainTorchOps

    def __call__(self, *args: Any) -> Step:
        with self.spy.watching():
            return self.layer(*args)


def check_choices(found: list[Step], exact: list[Step]) -> None:
    """No entry was left out whose exact score is clearly above that of a chosen one.

    Clearly: by more than twice e4m3's half step, 2 * 2**-4, of the largest: two scores are
    compared, each of a rounded query and a rounded key. A choice at random is off by about the
    largest.
    """
    for got, want in zip(found, exact, strict=True):
        for row, listed in enumerate(got.lists):
            scores = want.logits[row].double()
            chosen = listed[listed >= 0].long()
            seen = scores > float("-inf")
            assert len(set(chosen.tolist())) == len(chosen) == min(v32_layer.TOP_K, int(seen.sum()))
            rest = scores.clone()
            rest[chosen] = float("-inf")
            assert rest.max() <= scores[chosen].min() + scores[seen].abs().max() * 2.0**-3


def transformers_layer(model: Model, hidden: torch.Tensor, choices: Choices) -> torch.Tensor:
    """The whole sequence at once, with the same choices."""
    lists, experts = torch.cat(choices.lists).long(), torch.cat(choices.experts)
    layer, length = model.oracle, len(hidden)
    # Padding: a list that has some names every key that is seen, so that naming one again is fine.
    layer.self_attn.indexer.forward = lambda *args, **kwargs: lists.clamp(min=0)[None]
    layer.mlp.gate.forward = lambda x: route_to(layer.mlp.gate.weight, x, experts)
    positions = torch.arange(length)[None]
    out: torch.Tensor = layer(
        hidden[None],
        attention_mask=causal_mask(length, length, hidden.dtype),
        position_ids=positions,
        position_embeddings=DeepseekV32RotaryEmbedding(model.config)(hidden[None], positions),
    )
    return out[0]


def route_to(weight: torch.Tensor, x: torch.Tensor, experts: torch.Tensor) -> Any:
    """What transformers' router returns, for these experts."""
    logits = torch.nn.functional.linear(x.view(-1, x.shape[-1]), weight)
    weights, ids = weighted(logits, experts)
    return logits, weights, ids.long()
