"""What the engine itself costs in a step: everything outside `runner.execute`.

A runner that answers at once with one fixed tensor of logits takes the model's place, so a step is
nothing but scheduling, sampling, detokenising and handing events over. Printed per batch size and
kind of sampling, in ms: the median processor time of a step (the engine's thread; other work on the
machine does not count), its median and p95 by the clock, and the clock per step of a whole engine
with a reader on another thread.

    python benchmarks/engine_overhead.py [--vocab-size 49152] [--steps 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.batch import Batch
from hal_engine.engine_core import EngineCore, Events
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_all
from hal_engine.scheduler import SchedulerConfig

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, logprobs 5": {"logprobs": 5},
    "temperature": {"temperature": 0.8, "seed": 1},
    "temperature, top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
}


class WordTokenizer:
    """Every id is one short word."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset({0})
        self.special_token_ids = frozenset({0})
        self.has_chat_template = False

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [1 + len(word) for word in text.split()]

    def least_tokens(self, text: str) -> int:
        return 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.token_bytes(t) for t in token_ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return b" w%d" % token_id

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        raise ValueError("this tokenizer has no chat template")

    def close(self) -> None:
        """Nothing runs outside."""


class InstantRunner:
    """Answers with rows of one tensor; measures the time it is inside `execute`."""

    block_size = 16
    num_blocks = 8192
    max_model_len = 8192
    supports_embeddings = False
    num_replays = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(256, vocab_size, generator=generator)
        self.execute_s = 0.0

    def execute(self, batch: Batch) -> torch.Tensor:
        start = time.perf_counter()
        rows = len(batch.decode) + sum(s.logits == "last" for s in batch.prefill)
        logits = self._logits[:rows]
        self.execute_s += time.perf_counter() - start
        return logits

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        raise ValueError("this runner does not give embeddings")

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """Keeps everything: the bound op has a benchmark of its own."""
        return logits

    def close(self) -> None:
        self._logits = torch.empty(0)


def timed(core: EngineCore, runner: InstantRunner, samples: list[tuple[int, float, float]]) -> None:
    """Replaces `core.step` by one that notes (decoding sequences, seconds outside execute)."""
    step = core.step

    def timed_step() -> Events:
        decoding = len(core.scheduler.running)
        runner.execute_s = 0.0
        start, cpu = time.perf_counter(), time.thread_time()
        events = step()
        cpu = time.thread_time() - cpu
        samples.append((decoding, time.perf_counter() - start - runner.execute_s, cpu))
        return events

    core.step = timed_step  # type: ignore[method-assign]


def requests(batch: int, steps: int, kind: dict[str, Any]) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True, **kind)
    return [
        GenerationRequest(
            request_id=f"{i}", prompt_token_ids=tuple(range(10 + i, 138 + i)), sampling=sampling
        )
        for i in range(batch)
    ]


def run_core(
    vocab_size: int, batch: int, steps: int, kind: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Seconds per step of the core alone, by the clock and of the processor."""
    runner = InstantRunner(vocab_size)
    core = EngineCore(runner, WordTokenizer(vocab_size), SchedulerConfig(max_num_seqs=batch))
    samples: list[tuple[int, float, float]] = []
    timed(core, runner, samples)
    with torch.inference_mode():
        for request in requests(batch, steps, kind):
            core.submit(request, None, time.monotonic())
        while core.has_work:
            core.step()
    full = [(clock, cpu) for decoding, clock, cpu in samples if decoding == batch]
    return [clock for clock, _ in full], [cpu for _, cpu in full]


def run_loop(vocab_size: int, batch: int, steps: int, kind: dict[str, Any]) -> float:
    """Seconds per step of the whole engine with a reader: wall time over steps."""
    runner = InstantRunner(vocab_size)
    engine = Engine(
        "instant",
        runner,
        WordTokenizer(vocab_size),
        SchedulerConfig(max_num_seqs=batch),
        plan_json={"hash": "none"},
        op_calls=list,
    )

    async def scenario() -> float:
        start = time.perf_counter()
        await generate_all(engine, requests(batch, steps, kind), max_in_flight=batch)
        seconds = (time.perf_counter() - start) / engine.stats().steps
        await engine.close()
        return seconds

    return asyncio.run(scenario())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for sampling")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    print(f"{'sampling':24} batch      cpu   median      p95  with reader")
    for name, kind in KINDS.items():
        for batch in (1, 8, 16, 64) if name == "greedy" else (16,):
            clock, cpu = run_core(options.vocab_size, batch, options.steps, kind)
            row = {
                "cpu": statistics.median(cpu) * 1e3,
                "median": statistics.median(clock) * 1e3,
                "p95": statistics.quantiles(clock, n=20)[-1] * 1e3,
                "with_reader": run_loop(options.vocab_size, batch, options.steps, kind) * 1e3,
            }
            results.append({"sampling": name, "batch": batch, "unit": "ms", **row})
            print(
                f"{name:24} {batch:5} {row['cpu']:8.3f} {row['median']:8.3f} {row['p95']:8.3f} "
                f"{row['with_reader']:12.3f}"
            )
    if options.json:
        record = {"torch": torch.__version__, "vocab_size": options.vocab_size, "rows": results}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
