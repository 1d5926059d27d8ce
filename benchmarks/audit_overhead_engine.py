"""What an audit costs a decode step: none, light and full, side by side in one run.

Three runners of one model in one process take turns for a few steps each, so that what else
happens on the machine hits all alike; the full mode, many times slower, has every fifth turn only.
Printed are the mean time of a decode step by the clock, in ms, and what is above the runner that
nothing looks at: a mean, because what a light audit costs is in few of its steps. Turns that took
more than twice the median of their runner were disturbed and are left out of all three; how many
is printed. Goal: light at most 5%.

    python benchmarks/audit_overhead_engine.py MODEL [--batch 1 8] [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders.machine import load_average, machine_facts
from contenders.report import today

from hal.binding import BoundOps
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.audit.audited_runner import SAMPLE_EVERY, AuditedRunner, Mode
from hal_engine.audit.inspecting import Inspector
from hal_engine.audit.observer import CallObserver
from hal_engine.audit.step_mode import StepMode
from hal_engine.batch import ModelRunner
from hal_engine.building import build_rank
from hal_engine.engine_core import EngineCore
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.scheduler import SchedulerConfig
from hal_engine.tokenizer import load_tokenizer

GOAL_LIGHT = 0.05
STEPS_A_TURN = SAMPLE_EVERY  # each turn has one timed step
FULL_EVERY = 5  # rounds
DISTURBED = 2.0
PROMPT_TOKENS = 32
NUM_BLOCKS = 1024


@dataclass(slots=True)
class Contender:
    """One engine core, and what surrounds its steps."""

    name: str
    core: EngineCore
    step_mode: StepMode | None
    ms: list[float]

    def turn(self) -> None:
        for _ in range(STEPS_A_TURN):
            begin = time.perf_counter()
            with self.step_mode or nullcontext():
                self.core.step()
            self.ms.append((time.perf_counter() - begin) * 1e3)


def contender(
    planned: PlannedModel, registry: BackendRegistry, name: str, mode: Mode | None
) -> Contender:
    registry.create_runtime(planned.device)
    observer = CallObserver(Inspector() if mode == "full" else None)
    ops = BoundOps(planned.plan, observe=None if mode is None else observer.observe)
    local, _ = build_rank(planned, 0, None, NUM_BLOCKS, ops=ops)
    step = StepMode(observer)
    runner: ModelRunner = local if mode is None else AuditedRunner(local, observer, step, mode)
    options = planned.options
    config = SchedulerConfig(
        max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens
    )
    core = EngineCore(runner, load_tokenizer(planned.config), config)
    return Contender(name, core, step if mode == "full" else None, [])


def fill(one: Contender, batch: int, steps: int, vocab_size: int) -> None:
    """Decoding sequences that last for the whole run, after their prompts."""
    for number in range(batch):
        ids = tuple((number * 977 + 31 * i) % vocab_size for i in range(PROMPT_TOKENS))
        request = GenerationRequest(
            request_id=f"{one.name}-{batch}-{number}",
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=steps, ignore_eos=True),
        )
        one.core.submit(request, None, time.monotonic())
    for _ in range(4):
        with one.step_mode or nullcontext():
            one.core.step()
    one.ms.clear()


def measure(contenders: list[Contender], batch: int, rounds: int, vocab_size: int) -> Any:
    for one in contenders:
        fill(one, batch, (rounds + 2) * STEPS_A_TURN, vocab_size)
    for number in range(rounds):
        for one in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            if one.name != "full" or number % FULL_EVERY == 0:
                one.turn()
    for one in contenders:
        for seq in list(one.core.scheduler.running):
            one.core.cancel(seq)
    means = {one.name: mean_of_turns(one.ms) for one in contenders}
    plain = means["none"][0]
    return {
        name: {"ms": round(ms, 4), "above": round(ms / plain - 1.0, 4), "disturbed_turns": left_out}
        for name, (ms, left_out) in means.items()
    }


def mean_of_turns(ms: list[float]) -> tuple[float, int]:
    """The mean of a step over the turns that were not disturbed, and the number of the others."""
    turns = [statistics.fmean(ms[i : i + STEPS_A_TURN]) for i in range(0, len(ms), STEPS_A_TURN)]
    most = DISTURBED * statistics.median(turns)
    calm = [turn for turn in turns if turn <= most]
    return statistics.fmean(calm), len(turns) - len(calm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    registry = load_backends()
    planned = plan_model(arguments.model, EngineOptions(), registry, WaiverBook(), must_run=True)
    modes: dict[str, Mode | None] = {"none": None, "light": "light", "full": "full"}
    before = load_average()
    contenders = [contender(planned, registry, name, mode) for name, mode in modes.items()]
    with torch.inference_mode():
        results = {
            batch: measure(contenders, batch, arguments.rounds, planned.config.vocab_size)
            for batch in arguments.batch
        }
    for batch, rows in results.items():
        for name, row in rows.items():
            print(
                f"batch {batch:>3}  {name:<6} {row['ms']:>9.3f} ms  {row['above']:+8.1%}  "
                f"({row['disturbed_turns']} turns left out)"
            )
    document = {
        "date": today(),
        "machine": machine_facts(),
        "load": {"before": before, "after": load_average()},
        "sample_every": SAMPLE_EVERY,
        "goal_light": GOAL_LIGHT,
        "batches": results,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
