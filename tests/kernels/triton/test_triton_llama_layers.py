"""Llama layers through Triton kernels only, by the engine's own plan, decoder and runner.

The interpreter runs the kernels. In bfloat16, against transformers and against the reference ops,
both in float64 with the same weights.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from hal.binding import BoundOps
from hal.waivers import WaiverBook
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.runner import LocalRunner
from interpreted_backend import (
    CheckedCalls,
    InterpretedRegistry,
    PlainTorchOps,
    computed,
    interpreted_device,
    largest_error,
)

NUM_BLOCKS = 16
# Of a logit as a share of the largest one: bfloat16 keeps 8 bits, and a layer rounds ten times.
TOLERANCE = 2.0**-6
# Ends of the chunks of a prompt, within a block of 16, at its end and beyond it; then how many
# tokens one by one.
SHORT = ((5, 16), 1)
LONG = ((5, 16, 35), 6)
ROUTES = [pytest.param(SHORT, id="short"), pytest.param(LONG, id="long", marks=pytest.mark.long)]
Route = tuple[tuple[int, ...], int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    made = tiny_models.make_tiny_model("llama", folder, seed=torch.seed() % 2**31, num_layers=2)
    made.oracle.bfloat16().double()  # the same weights as the engine's
    return made


def planned(folder: Path) -> PlannedModel:
    registry: Any = InterpretedRegistry()
    options = EngineOptions(
        precision="bf16", max_num_batched_tokens=64, max_num_seqs=4, num_blocks=NUM_BLOCKS
    )
    return plan_model(
        folder, options, registry, WaiverBook(), device=interpreted_device(), must_run=True
    )


@pytest.fixture(scope="module")
def plan(model: Any) -> PlannedModel:
    return planned(model.folder)


def steps(runner: LocalRunner, route: Route, ids: list[int]) -> list[torch.Tensor]:
    """Logits of the last token of each chunk, among a neighbour's, and of each decoded token."""
    blocks = random.sample(range(NUM_BLOCKS - 1), 3)
    neighbour = ScheduledSequence(1, ids[7:12], 0, [NUM_BLOCKS - 1], "none")
    found, first = [], 0
    for end in route[0]:
        chunk = ScheduledSequence(0, ids[first:end], first, blocks, "last")
        found.append(runner.execute(Batch(prefill=[neighbour, chunk])))
        first = end
    for at in range(first, first + route[1]):
        token = ScheduledSequence(0, [ids[at]], at, blocks, "last")
        found.append(runner.execute(Batch(decode=[token])))
    return found


def random_ids(route: Route) -> list[int]:
    return torch.randint(2, tiny_models.VOCAB_SIZE, (route[0][-1] + route[1],)).tolist()


def expected(model: Any, route: Route, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.oracle(torch.tensor([ids])).logits[0]
    ends = [end - 1 for end in route[0]]
    return logits[[*ends, *range(route[0][-1], len(ids))]]


def test_every_op_of_the_plan_is_a_triton_kernel(plan: PlannedModel) -> None:
    names = {op.choice.name for op in plan.plan.ops}
    assert names == {f"test.{op}.triton" for op in {o.site.request.op for o in plan.plan.ops}}
    assert not plan.plan.waivers_in_use()
    assert {"gemm", "attention", "norm.rms", "rope_kv_write", "embedding"} <= {
        op.site.request.op for op in plan.plan.ops
    }


@pytest.mark.parametrize("route", ROUTES)
def test_chunks_and_decode_are_transformers_logits(
    model: Any, plan: PlannedModel, route: Route
) -> None:
    runner, ops = build_rank(plan, 0, None, NUM_BLOCKS)
    ids = random_ids(route)
    spy = PlainTorchOps()
    with spy.watching():
        found = steps(runner, route, ids)
    assert largest_error(torch.cat(found), expected(model, route, ids)) <= TOLERANCE
    assert computed(spy) == {}
    calls = {count.site: count.calls for count in ops.counts() if count.phase != "prefill"}
    num_steps = len(route[0]) + route[1]
    assert calls["layers.1.down_proj"] == num_steps
    assert calls["layers.1.attention"] == route[1]
    assert spy.num_launches >= sum(count.calls for count in ops.counts())


@pytest.mark.parametrize("route", ROUTES)
def test_every_call_is_the_reference_on_the_same_inputs(plan: PlannedModel, route: Route) -> None:
    """Each op where it stands, on what the kernels before it made, within the op's tolerance."""
    checked = CheckedCalls()
    runner, _ = build_rank(
        plan, 0, None, NUM_BLOCKS, ops=BoundOps(plan.plan, observe=checked.observe)
    )
    steps(runner, route, random_ids(route))
    assert set(checked.seen) == {o.site.request.label for o in plan.plan.ops} - {
        "sample.top_k_top_p"  # of the sampler, which no step here asks
    }


def test_the_spy_sees_a_product_in_plain_torch() -> None:
    spy = PlainTorchOps()
    with spy.watching(), torch.inference_mode():
        torch.nn.functional.linear(torch.randn(2, 3), torch.randn(4, 3)).softmax(1)
    assert {"aten::mm", "aten::_softmax"} <= computed(spy).keys()
