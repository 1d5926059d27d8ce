"""Decode steps that are captured and replayed: the same tokens, the same counts, nothing hidden."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_models
from hal.binding import BoundOps
from hal.device import EAGER, DevicePolicy
from hal.errors import PlanError
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_sync
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.runner import LocalRunner
from hal_engine.serving import open_engine
from hal_engine.step_capture import capture_notes, capture_scope, captured_sizes

NUM_BLOCKS = 64


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    tiny_models.make_tiny_model(request.param, made, seed=torch.seed() % 2**31)
    return made


@pytest.fixture(scope="module")
def registry() -> BackendRegistry:
    return load_backends()


def plan_of(folder: Path, registry: BackendRegistry, **options: Any) -> PlannedModel:
    chosen = EngineOptions(precision="fp32", num_blocks=NUM_BLOCKS, **options)
    return plan_model(folder, chosen, registry, WaiverBook())


def build(
    planned: PlannedModel, registry: BackendRegistry, ops: BoundOps | None = None
) -> tuple[LocalRunner, BoundOps]:
    runtime = registry.create_runtime(planned.device)
    return build_rank(planned, 0, None, NUM_BLOCKS, runtime=runtime, ops=ops)


def decode_batch(count: int, position: int) -> Batch:
    free = random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return Batch(
        decode=[
            ScheduledSequence(
                i,
                [random.randrange(tiny_models.VOCAB_SIZE)],
                position,
                [free.pop() for _ in range(position // 16 + 1)],
                "last",
            )
            for i in range(count)
        ]
    )


def calls(ops: BoundOps) -> dict[tuple[str, str, str, str], int]:
    return {(c.site, c.phase, c.implementation, str(c.tokens)): c.calls for c in ops.counts()}


@pytest.fixture
def engines(folder: Path) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def open_one(**options: Any) -> Engine:
        opened.append(open_engine(folder, precision="fp32", **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        asyncio.run(engine.close())


def test_tokens_are_those_of_calls_one_by_one(engines: Callable[..., Engine]) -> None:
    """With prefix reuse, preemption, sequences that end at different times, and contexts that pass
    the length that a capture is for."""
    prefix = random.choices(range(2, tiny_models.VOCAB_SIZE), k=random.randint(20, 60))
    requests = [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=(*prefix, *random.choices(range(2, 500), k=random.randint(30, 60))),
            sampling=SamplingParams(
                temperature=random.choice([0.0, 1.0]),
                seed=i,
                max_tokens=random.randint(40, 60),
                ignore_eos=True,
            ),
        )
        for i in range(9)
    ]
    results = {}
    for capture in ("auto", "off"):
        engine = engines(capture_steps=capture, num_blocks=18, max_num_seqs=6, max_model_len=512)
        results[capture] = [r.token_ids for r in generate_sync(engine, requests)]
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.replayed_steps > stats.steps // 3) == (capture == "auto")
    assert results["auto"] == results["off"]


def test_each_replay_counts_the_calls_of_its_step(folder: Path, registry: BackendRegistry) -> None:
    planned = plan_of(folder, registry)
    (replaying, its_ops), (calling, other_ops) = (
        build(planned, registry),
        build_rank(planned, 0, None, NUM_BLOCKS),
    )
    batches = [decode_batch(random.randint(1, 4), random.randint(0, 200)) for _ in range(20)]
    before = calls(its_ops)
    for batch in batches:
        got = replaying.execute(batch).clone()
        assert got.shape == calling.execute(batch).shape
    assert replaying.num_replays > 0
    assert calling.num_replays == 0
    counted = {key: number - before[key] for key, number in calls(its_ops).items()}
    assert counted == calls(other_ops)


def test_a_replay_calls_no_op_of_torch(folder: Path, registry: BackendRegistry) -> None:
    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    runner, _ = build(plan_of(folder, registry), registry)
    batch = decode_batch(3, 20)
    runner.execute(batch)
    with Seen() as seen:
        runner.execute(batch)
    assert runner.num_replays >= 1
    assert seen.names == []


def test_steps_with_prompts_and_without_logits_run_call_by_call(
    folder: Path, registry: BackendRegistry
) -> None:
    runner, _ = build(plan_of(folder, registry), registry)
    before = runner.num_replays
    batch = decode_batch(2, 20)
    batch.decode[0].logits = "none"
    assert runner.execute(batch).shape[0] == 1
    prompt = ScheduledSequence(9, [3, 4, 5], 0, [1], "last")
    assert runner.execute(Batch(decode=batch.decode[1:], prefill=[prompt])).shape[0] == 2
    assert runner.num_replays == before


def test_a_step_that_somebody_looks_into_runs_call_by_call(
    folder: Path, registry: BackendRegistry
) -> None:
    planned, looks, seen = plan_of(folder, registry), [False], []

    def observe(binding: Any, kernel: Any) -> Any:
        def call(num_tokens: int, *args: Any) -> Any:
            seen.append(binding.site)
            return kernel(*args)

        return call

    ops = BoundOps(planned.plan, observe=observe, is_looking=lambda: looks[0])
    runner, _ = build(planned, registry, ops)
    batch = decode_batch(2, 20)
    expected = runner.execute(batch).clone()
    seen.clear()
    assert torch.equal(runner.execute(batch), expected)
    assert seen == []
    looks[0] = True
    assert torch.equal(runner.execute(batch), expected)
    assert "layers.0.o_proj" in seen


def test_a_wrapped_kernel_is_always_called(folder: Path, registry: BackendRegistry) -> None:
    planned, called = plan_of(folder, registry), []

    def wrap(site: str, name: str, kernel: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            called.append(site)
            return kernel(*args)

        return wrapped

    runner, _ = build(planned, registry, BoundOps(planned.plan, wrap=wrap))
    for _ in range(3):
        called.clear()
        runner.execute(decode_batch(2, 20))
        assert "lm_head" in called


def test_captures_are_bounded(folder: Path, registry: BackendRegistry) -> None:
    runner, ops = build(plan_of(folder, registry), registry)
    plain, other_ops = build_rank(plan_of(folder, registry), 0, None, NUM_BLOCKS)
    assert runner._captured is not None
    runner._captured.most_captures = 3
    before = calls(ops)
    for count in (1, 1, 2, 3, 3, 4, 5, 1, 4, 4):
        batch = decode_batch(count, 0)
        got = runner.execute(batch).clone()
        assert torch.equal(got, plain.execute(batch))
        assert len(runner._captured._kept) <= 3
    counted = {key: number - before[key] for key, number in calls(ops).items()}
    assert counted == calls(other_ops)
    counter = ops._bound[0].counter
    assert len(counter._repeats[1]) <= 3  # what was counted by captures that went is a number


@pytest.mark.parametrize(("block_size", "length", "sequences"), [(16, 8, 16), (64, 32, 64)])
def test_a_context_shorter_than_a_block_opens(
    folder: Path, registry: BackendRegistry, block_size: Any, length: int, sequences: int
) -> None:
    planned = plan_of(
        folder,
        registry,
        block_size=block_size,
        max_model_len=length,
        max_num_seqs=sequences,
    )
    runner, _ = build(planned, registry)
    assert runner.execute(decode_batch(2, length - 1)).shape[0] == 2


def test_a_closed_runner_lets_go_of_its_cache(folder: Path, registry: BackendRegistry) -> None:
    runner, _ = build(plan_of(folder, registry), registry)
    runner.execute(decode_batch(2, 20))
    cache = weakref.ref(runner._caches[0][0])
    runner.close()
    assert cache() is None


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_runner_ends_with_its_last_reference(
    folder: Path, registry: BackendRegistry, is_closed: bool
) -> None:
    """Its weights and caches do not wait for the collector: nothing refers to it in a circle."""
    runner, ops = build(plan_of(folder, registry), registry)
    runner.execute(decode_batch(2, 20))
    kept = [weakref.ref(one) for one in (runner, runner._decoder, runner._caches[0][0])]
    gc.collect()
    gc.disable()
    try:
        if is_closed:
            runner.close()
        del runner, ops
        assert [one() for one in kept] == [None] * 3
    finally:
        gc.enable()


def notes_of(planned: PlannedModel) -> list[str]:
    return [note for note in planned.plan.notes if note.startswith("decode steps")]


def test_the_plan_says_which_steps_are_captured(folder: Path, registry: BackendRegistry) -> None:
    planned = plan_of(folder, registry, max_num_seqs=8)
    (note,) = notes_of(planned)
    assert note == "decode steps of 1 to 8 sequences are captured and run as one call"
    off = plan_of(folder, registry, capture_steps="off")
    assert notes_of(off) == ["decode steps run call by call: capture_steps is off"]
    assert captured_sizes(off.plan, off.device, off.options) == []


def test_a_device_that_is_forced_to_run_eagerly_captures_nothing(
    folder: Path, registry: BackendRegistry
) -> None:
    planned = plan_of(folder, registry)
    policy = DevicePolicy(forced_features={EAGER: "replays lose a call"}, capture_saves_us=9.0)
    forced = dataclasses.replace(planned.plan, policy={"forced_features": policy.forced_features})
    assert capture_notes(forced, planned.device, planned.options) == [
        "decode steps run call by call: the device's policy forces eager on: replays lose a call"
    ]
    assert captured_sizes(forced, planned.device, planned.options) == []
    assert capture_scope(planned.device, policy, planned.options) is None
    assert capture_scope(planned.device, DevicePolicy(capture_saves_us=9.0), planned.options)


def test_the_plan_names_what_cannot_be_captured(folder: Path, registry: BackendRegistry) -> None:
    options = EngineOptions(precision="fp32", num_blocks=NUM_BLOCKS, max_num_seqs=8)
    use = {"gemm": "cpu.gemm.linear_fp32"}
    planned = plan_model(folder, options, registry, WaiverBook(), use)
    (note,) = notes_of(planned)
    assert note.startswith("decode steps of 1 to 8 sequences run call by call: not safe to capture")
    assert "cpu.gemm.linear_fp32 (layers.*.qkv_proj)" in note
    runner, _ = build(planned, registry)
    runner.execute(decode_batch(2, 20))
    assert runner.num_replays == 0


def test_a_runtime_that_cannot_capture_is_an_error_where_the_plan_says_it_does(
    folder: Path, registry: BackendRegistry
) -> None:
    class Without:
        """A runtime of a plug-in whose device claims the feature."""

    planned = plan_of(folder, registry)
    with pytest.raises(PlanError, match="Without without a method capture"):
        build_rank(planned, 0, None, NUM_BLOCKS, runtime=Without())  # type: ignore[arg-type]


def test_sizes_are_cut_where_an_implementation_changes(
    folder: Path, registry: BackendRegistry
) -> None:
    planned = plan_of(folder, registry, max_num_seqs=8)
    device, options = planned.device, planned.options
    ops = list(planned.plan.ops)
    index = next(i for i, op in enumerate(ops) if op.site.site == "lm_head")
    choice = dataclasses.replace(ops[index].choice, is_graph_safe=False)
    high = ops[index].tokens.high
    decision = dataclasses.replace(ops[index].decision, choice=choice)
    low_range, high_range = type(ops[index].tokens)(1, 5), type(ops[index].tokens)(6, high)
    ops[index : index + 1] = [
        dataclasses.replace(ops[index], tokens=low_range),
        dataclasses.replace(ops[index], tokens=high_range, decision=decision),
    ]
    plan = dataclasses.replace(planned.plan, ops=ops)
    sizes = captured_sizes(plan, device, options)
    assert [n for part in sizes for n in range(part.low, part.high + 1)] == [1, 2, 3, 4, 5]
