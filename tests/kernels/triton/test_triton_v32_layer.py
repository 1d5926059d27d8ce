"""A V3.2-like layer through Triton kernels only: latent attention over FP8 rows, an indexer that
chooses keys, FP8 products with block scales, routed and shared experts.

The calls are those that the engine plans for the family, joined where its plan joins them; the
interpreter runs the kernels. Against the reference ops one by one, in float64, and against
transformers' layer with the checkpoint's weights.
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

import v32_model
from absent_plans import plan as plan_of
from absent_plans import profile
from hal.binding import BoundOps
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import KV_FORMATS
from hal.plan import OpSite, Plan
from hal.planner import PlanInputs, create_plan
from hal.waivers import WaiverBook
from hal_engine.config import load_model_config
from hal_engine.models.device_formats import with_fp8_of
from hal_engine.models.joined_sites import model_joins
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
from v32_layer import Rows, Step, V32Layer
from v32_model import CONFIG, HIDDEN, MATRICES
from v32_references import Choices, References, weighted

BLOCK = 64
# Ends of the chunks of a prompt, then how many tokens one by one: more keys than are chosen.
SHORT = ((64, 69), 1)
LONG = ((30, 70, 150), 3)
# With the joined calls of the device, or all.
ROUTES = [
    pytest.param("device", SHORT, id="short"),
    pytest.param("all", LONG, id="long", marks=pytest.mark.long),
]
Route = tuple[tuple[int, ...], int]
# Root mean square of the error over that of the result. Activations and cached rows are rounded to
# e4m3 (2**-4 each), and what bfloat16 loses between ops falls to the other side of such steps.
TOLERANCE = 2.0**-3.5
# Of the plan, what is around the layers, and what the grouped products do in their own call.
UNASKED = {
    "embed", "final_norm", "lm_head", "sampler.top_k_top_p", "layers.0.experts.input_quantize",
    "layers.0.experts.down_quantize",
}  # fmt: skip


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
            parameters[name] = v32_model.stored(drawn, is_fp8=MATRICES[name])
        else:
            drawn = torch.randn(tensor.shape) * 0.1 + (0.0 if "bias" in name else 1.0)
            parameters[name] = drawn.bfloat16().float()
    layer.load_state_dict(parameters)
    return Model(parameters, layer.double().eval(), config)


@dataclass(frozen=True)
class Planned:
    """A plan, and the sites that it joined calls of."""

    plan: Plan
    sites: Sequence[OpSite]


@pytest.fixture(scope="module")
def on_device() -> Plan:
    """What `hal plan deepseek-v3.2` says of a device of the interpreted architecture."""
    return plan_of("deepseek-v3.2", profile("h200-sxm"))


@pytest.fixture(scope="module")
def planned(
    tmp_path_factory: pytest.TempPathFactory, on_device: Plan, request: pytest.FixtureRequest
) -> Planned:
    """With the parameter "device" no calls are joined but those that are joined on the device."""
    config = load_model_config(v32_model.write_config(tmp_path_factory.mktemp("v32")))
    device, registry = interpreted_device(), InterpretedRegistry()
    precision = resolve_precision(config, "auto", "auto", device.features)
    limits = StepLimits(max_num_batched_tokens=128, max_num_seqs=4, block_size=BLOCK)
    sites = with_fp8_of(model_sites(config, precision, limits), device)
    names = {op.site.site for op in on_device.ops}
    inputs = PlanInputs(
        sites=sites,
        device=device,
        policy=registry.policy(device),
        candidates=registry.candidates,
        waivers=WaiverBook(),
        joins=[j for j in model_joins(sites) if request.param == "all" or j.site.site in names],
    )
    plan = create_plan(
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
    return Planned(plan, sites)


def caches(count: int, dtype: str) -> torch.Tensor:
    """Pages in which whatever nobody wrote is NaN."""
    return torch.full((count, KV_FORMATS[dtype].page_bytes(BLOCK)), 0xFF, dtype=torch.uint8)


def run(
    layer: Callable[..., Step], hidden: torch.Tensor, route: Route, table: torch.Tensor
) -> list[Step]:
    """Every step of one sequence whose pages are those of the table."""
    kv_cache, index_cache = caches(8, "fp8_656"), caches(8, "fp8_132")
    steps, first = [], 0
    for number, end in enumerate(ends_of(route)):
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


@pytest.mark.parametrize("planned", ["device", "all"], indirect=True)
def test_every_op_of_the_plan_is_a_triton_kernel(planned: Planned) -> None:
    plan = planned.plan
    names = {op.choice.name for op in plan.ops}
    assert names == {f"test.{op.site.request.op}.triton" for op in plan.ops}
    assert {op.site.request.op for op in plan.ops} >= {
        *("mla_attention", "quantize", "gemm", "grouped_gemm", "moe_router", "moe_dispatch"),
        *("norm_quantize", "latent_kv_write", "index_selection"),
    }
    formats = {getattr(op.site.request, "weight_format", None) for op in plan.ops}
    assert "fp8_block128_a8" in {form.name for form in formats if form is not None}


@pytest.mark.parametrize("planned", ["device"], indirect=True)
def test_the_calls_are_those_of_the_whole_model_on_the_device(
    planned: Planned, on_device: Plan
) -> None:
    """Of a layer with experts, for the smallest steps."""
    (last,) = {max(op.site.layers) for op in on_device.ops if op.site.site.endswith(".router")}

    def calls(plan: Plan, layer: int) -> set[tuple[str, str, str]]:
        smallest = [op for op in plan.ops if layer in op.site.layers and op.tokens.low == 1]
        return {(op.site.site, op.site.request.op, op.site.request.phase) for op in smallest}

    assert calls(planned.plan, 0) == calls(on_device, last)


@pytest.mark.parametrize(("planned", "route"), ROUTES, indirect=["planned"])
def test_chunks_and_decode_are_the_references_and_transformers(
    planned: Planned, model: Model, route: Route
) -> None:
    length, count = ends_of(route)[-1], len(ends_of(route))
    hidden = torch.randn(length, HIDDEN).bfloat16()
    table = torch.randperm(8)[: -(-length // BLOCK)].to(torch.int32)
    checked = CheckedCalls()  # each call by itself, within its op's tolerance
    ops = BoundOps(planned.plan, observe=checked.observe)
    layer = V32Layer(ops, model.parameters, torch.bfloat16)
    spy = PlainTorchOps()
    with torch.inference_mode():
        found = run(Watched(layer, spy), hidden, route, table)
    # What no op has: the scales of index queries, and two sums behind the experts.
    assert computed(spy) == {"aten::mul": count, "aten::add": 2 * count}
    assert spy.num_launches > 30 * count
    check_all_called(planned.plan, ops)
    assert checked.seen.total() == sum(one.calls for one in ops.counts())
    choices = Choices([s.lists for s in found], [s.experts for s in found])
    golden = V32Layer(References(planned.sites, choices), model.parameters, torch.float64)
    exact = run(golden, hidden.double(), route, table)
    check_choices(found, exact)
    with torch.inference_mode():
        expected = transformers_layer(model, hidden.double(), choices)
    same = V32Layer(References(planned.sites, choices), model.parameters, torch.bfloat16)
    with torch.inference_mode():
        rounded = run(same, hidden, route, table)
    got, want, plain = (whole(steps) for steps in (found, exact, rounded))
    # As far from float64 as the references in bfloat16 are, which is what the formats cost.
    assert rms_error(got, want) <= min(TOLERANCE, 1.5 * rms_error(plain, want))
    assert rms_error(got, expected) <= TOLERANCE


def check_all_called(plan: Plan, ops: BoundOps) -> None:
    """Every call of the plan was made, in one of its sizes."""
    sites = {(name, op.site.request.phase) for op in plan.ops for name in op.site.names()}
    called = {(c.site, c.phase) for c in ops.counts() if c.calls}
    assert {name for name, _ in sites - called} == UNASKED


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
        assert want.logits is not None
        for row, listed in enumerate(got.lists):
            scores = want.logits[row].double()
            chosen = listed[listed >= 0].long()
            seen = scores > float("-inf")
            assert len(set(chosen.tolist())) == len(chosen) == min(v32_model.TOP_K, int(seen.sum()))
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
