"""Runs a model for a moment and compares what ran with what was planned."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hal.binding import BoundOps, CallCount
from hal.dispatch_spy import DispatchSpy, EscapedCall
from hal.errors import PlanError
from hal.plugins.registry import BackendRegistry
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.batch import Batch
from hal_engine.building import Progress, build_rank, choose_num_blocks
from hal_engine.engine_loop import Engine
from hal_engine.offline import Completion, generate_all
from hal_engine.planning import PlannedModel
from hal_engine.runner import LocalRunner
from hal_engine.scheduler import SchedulerConfig
from hal_engine.serving import model_id, op_call_counts
from hal_engine.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What was observed. `counts` has every bound call site, called or not."""

    planned: PlannedModel
    counts: Sequence[CallCount]
    leaf_ops: dict[tuple[str, str], Counter[str]]
    escaped: Sequence[EscapedCall]
    num_tracked: int
    completions: Sequence[Completion]

    @property
    def never_called(self) -> list[CallCount]:
        """Planned call sites (any token range) that this load did not reach."""
        reached = {(c.site, c.phase) for c in self.counts if c.calls}
        return [c for c in self.counts if (c.site, c.phase) not in reached]


class SpiedRunner(LocalRunner):
    """A runner whose every torch op is seen once it has been given a spy."""

    spy: DispatchSpy | None = None

    def execute(self, batch: Batch) -> torch.Tensor:
        with self.spy or nullcontext():
            return super().execute(batch)

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        with self.spy or nullcontext():
            return super().top_k_top_p(logits, top_k, top_p)


def synthetic_requests(planned: PlannedModel, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of several lengths, greedy and sampled, that reach both phases and many ranges."""
    rng = random.Random(seed)
    longest = min(planned.max_model_len - 16, 3 * planned.options.max_num_batched_tokens // 2)
    lengths = [1, 2, 7, 30, 100, longest]
    requests = []
    for number, length in enumerate(length for length in lengths if 0 < length <= longest):
        ids = tuple(rng.randrange(planned.config.vocab_size) for _ in range(length))
        sampled = SamplingParams(
            temperature=0.8, top_k=20, top_p=0.9, seed=number, max_tokens=8, ignore_eos=True
        )
        greedy = SamplingParams(max_tokens=8, ignore_eos=True)
        requests.append(
            GenerationRequest(
                request_id=f"audit-{number}",
                prompt_token_ids=ids,
                sampling=sampled if number % 2 else greedy,
            )
        )
    return requests


def audit_model(
    planned: PlannedModel,
    registry: BackendRegistry,
    requests: Sequence[GenerationRequest] | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Loads the model, runs the requests together and one alone, and gathers what was seen.

    Raises PlanError for several ranks (this audit looks at one process), and what loading raises.
    """
    if planned.options.tp != 1:
        raise PlanError("audit", "one rank (--tp 1)", f"--tp {planned.options.tp}", "drop --tp")
    spy = DispatchSpy()
    runtime = registry.create_runtime(planned.device)
    num_blocks = choose_num_blocks(planned, runtime.free_memory_bytes())
    runner, ops = build_rank(
        planned,
        0,
        None,
        num_blocks,
        progress,
        ops=BoundOps(planned.plan, wrap=spy.wrap),
        runner_type=SpiedRunner,
    )
    if isinstance(runner, SpiedRunner):
        runner.spy = spy
    requests = synthetic_requests(planned) if requests is None else requests
    completions = asyncio.run(_run(planned, runner, ops, requests))
    return AuditReport(
        planned=planned,
        counts=list(ops.counts()),
        leaf_ops=spy.leaf_ops,
        escaped=spy.escaped,
        num_tracked=spy.num_tracked,
        completions=completions,
    )


async def _run(
    planned: PlannedModel, runner: Any, ops: BoundOps, requests: Sequence[GenerationRequest]
) -> list[Completion]:
    options = planned.options
    engine = Engine(
        model_id(planned),
        runner,
        load_tokenizer(planned.config),
        SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_waiting=max(options.max_waiting, len(requests)),
            prefix_reuse=options.prefix_reuse,
        ),
        plan_json=planned.plan.to_dict(),
        op_calls=lambda: op_call_counts(ops),
    )
    try:
        return await generate_all(engine, requests)
    finally:
        await engine.close()
