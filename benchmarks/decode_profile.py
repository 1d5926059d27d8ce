"""Where a decode step of the engine goes: each bound call timed in place, by call site; beside it
the time of the step as the engine runs it, captured, as one call.

For a goal that was missed. The calls of layers are added up by site; "the rest" of a step is what
lies between the calls, with sampling and scheduling. Medians over calls and over steps of as many
rows as there are prompts (random tokens). Each case is a process of its own, one after the other.

  python benchmarks/decode_profile.py --model MODEL                          fp32 at batch 1
  python benchmarks/decode_profile.py --model MODEL --cases fp32:1 w8a8:16   PRECISION:BATCH

Timing adds two clock readings to each call (about 0.2 µs). Kept: results/<date>-decode-profile.md.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from contenders.machine import load_average, machine_facts
from contenders.report import today

from hal.binding import BoundOps
from hal_engine import building
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.batch import Batch
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_sync
from hal_engine.runner import LocalRunner
from hal_engine.serving import open_engine

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT_TOKENS = 128


class CallTimes:
    """Seconds of each call, by site of any layer, implementation and rows of its first operand."""

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        self.begun: list[tuple[int, float]] = []  # (rows, when) of each step's first call

    def wrap(self, site: str, implementation: str, kernel: Callable[..., Any]) -> Any:
        name = re.sub(r"^layers\.\d+\.", "", site)

        def timed(*args: Any, **fields: Any) -> Any:
            start = time.perf_counter()
            result = kernel(*args, **fields)
            end = time.perf_counter()
            rows = args[0].shape[0]
            self.seconds[name, implementation, rows].append(end - start)
            if name == "embed":
                self.begun.append((rows, start))
            return result

        return timed

    def step_ms(self, rows: int) -> float:
        """Median time from a step of so many rows to the next one like it."""
        pairs = zip(self.begun, self.begun[1:], strict=False)
        return 1000 * statistics.median(
            later - start for (first, start), (second, later) in pairs if first == second == rows
        )


def generate(engine: Engine, batch: int, steps: int) -> None:
    """Random prompts, `steps` decode steps behind them."""
    numbers = random.Random()
    sampling = SamplingParams(temperature=0.0, max_tokens=1 + steps, ignore_eos=True)
    requests = [
        GenerationRequest(
            request_id=f"profile-{number}",
            prompt_token_ids=tuple(numbers.choices(range(1000, 40000), k=PROMPT_TOKENS)),
            sampling=sampling,
        )
        for number in range(batch)
    ]
    try:
        generate_sync(engine, requests)
    finally:
        asyncio.run(engine.close())


def replay_ms(options: dict[str, Any], batch: int, steps: int) -> float:
    """Median ms from one decode step to the next as the engine runs them: captured, as one call."""
    begun: list[float] = []
    execute = LocalRunner.execute

    def noted(runner: LocalRunner, work: Batch) -> torch.Tensor:
        if len(work.decode) == batch and not work.prefill:
            begun.append(time.perf_counter())
        return execute(runner, work)

    engine = open_engine(**options)
    with mock.patch.object(LocalRunner, "execute", noted):
        generate(engine, batch, steps)
    return 1000 * statistics.median(later - start for start, later in pairwise(begun))


def profile(model: str, precision: str, batch: int, steps: int, threads: int) -> dict[str, Any]:
    """ms of a decode step as one call and call by call, and of each site's calls in it."""
    torch.set_num_threads(threads)
    options = {
        "model": model,
        "precision": precision,
        "max_num_seqs": batch,
        "max_model_len": 1024,
        "prefix_reuse": False,
    }
    captured_ms = replay_ms(options, batch, steps)
    times = CallTimes()
    with mock.patch.object(building, "BoundOps", functools.partial(BoundOps, wrap=times.wrap)):
        engine = open_engine(**options)
    generate(engine, batch, steps)
    step_ms = times.step_ms(batch)
    num_steps = len([rows for rows, _ in times.begun if rows == batch])
    rows = []
    for (site, implementation, num_rows), seconds in times.seconds.items():
        if num_rows == batch and len(seconds) >= num_steps // 2:
            calls = round(len(seconds) / num_steps)
            each_us = 1e6 * statistics.median(seconds)
            rows.append(
                {
                    "site": site,
                    "implementation": implementation,
                    "calls": calls,
                    "us": each_us,
                    "ms": calls * each_us / 1000,
                }
            )
    rows.sort(key=lambda row: -row["ms"])
    return {
        "precision": precision,
        "batch": batch,
        "captured_ms": captured_ms,
        "step_ms": step_ms,
        "rows": rows,
    }


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"## {found['precision']}, batch {found['batch']}: {found['captured_ms']:.1f} ms a step, "
        f"{1000 * found['batch'] / found['captured_ms']:.0f} tokens/s",
        "",
        f"Captured, as it is run. Call by call, timed: {found['step_ms']:.1f} ms, of which",
        "",
        "| call site | implementation | calls a step | µs each | ms a step | share |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        share = row["ms"] / found["step_ms"]
        lines.append(
            f"| {row['site']} | {row['implementation']} | {row['calls']} | {row['us']:.1f} "
            f"| {row['ms']:.2f} | {share:.0%} |"
        )
    rest = found["step_ms"] - sum(row["ms"] for row in found["rows"])
    lines.append(f"| the rest | | | | {rest:.2f} | {rest / found['step_ms']:.0%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a .gguf file or a folder")
    parser.add_argument("--cases", nargs="+", default=["fp32:1"], metavar="PRECISION:BATCH")
    parser.add_argument("--steps", type=int, default=64, help="decode steps (default 64)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        precision, batch = options.case.rsplit(":", 1)
        found = profile(options.model, precision, int(batch), options.steps, options.threads)
        print(json.dumps(found))
        return 0
    load, sections = load_average(), []
    for case in options.cases:
        command = [sys.executable, __file__, "--model", options.model, "--case", case]
        command += ["--steps", str(options.steps), "--threads", str(options.threads)]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        sections.append(markdown(json.loads(told.splitlines()[-1])))
        print(sections[-1], flush=True)
    facts = machine_facts()
    head = f"# Decode steps of {Path(options.model).stem} by call, {today()}\n\n"
    head += f"{facts['cpu']}, {facts['cores']} cores, {options.threads} threads; "
    head += f"load average before: {load:.1f}.\n\n"
    path = options.results / f"{today()}-decode-profile.md"
    path.write_text(head + "\n".join(sections), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
