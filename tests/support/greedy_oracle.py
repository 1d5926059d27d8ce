"""What transformers says to a prompt, and whether an engine says the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from hal.binding import BoundOps
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.api import AsyncEngine, GenerationRequest, SamplingParams
from hal_engine.building import build_rank
from hal_engine.engine_loop import Engine
from hal_engine.offline import Completion, generate_sync
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.runner import LocalRunner
from hal_engine.scheduler import SchedulerConfig
from hal_engine.serving import op_call_counts
from hal_engine.tokenizer import load_tokenizer

# Two float32 programs may order two tokens differently only if the oracle's own two best logits
# are closer than this share of the larger one.
TIE = 1e-4
NUM_NEW_TOKENS = 64

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "1, 2, 3, 4, 5,",
    "Q: What is the boiling point of water?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "import numpy as np\nimport torch\n\nclass",
    "Die Hauptstadt von Deutschland ist",
    "La vie est belle parce que",
    "SELECT name, age FROM people WHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "The recipe needs two eggs, 100 g of flour and",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first human",
    "x = 3\ny = 4\nprint(x * y)  # prints",
    "a",
    "Roses are red,\nViolets are blue,",
    "Photosynthesis is the process by which",
    "日本の首都は",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "To be, or not to be, that is",
    "| city | people |\n|---|---|\n| Paris |",
    "<html>\n<head>\n<title>",
    "Three reasons to learn mathematics:\n1.",
    "She opened the door and saw",
    "Newton's second law states that",
    "Breaking news: scientists have",
    "The square root of 144 is",
    "for (int i = 0; i < n; i++) {",
    "🙂🙂🙂",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?"
    "<|im_end|>\n<|im_start|>assistant\n",
    "Water, fire, earth, air. " * 25 + "The fifth element is",
)


def load_gguf_in_float32(path: Path) -> Any:
    """The model of a GGUF as transformers reads it: every block at its exact value."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def greedy(model: Any, prompts: Sequence[Sequence[int]], count: int, batch: int) -> list[list[int]]:
    """`generate` of transformers without sampling; the end of text is a token like others."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        width = max(len(prompts[i]) for i in members)
        ids = torch.zeros(len(members), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(members):
            ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, width - len(prompts[i]) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, use_cache=True
            )
        for row, i in enumerate(members):
            found[i] = out[row, width:].tolist()
            assert len(found[i]) == count
    return [found[i] for i in range(len(prompts))]


@dataclass
class GreedyOracle:
    """A transformers model, prompts, and its greedy continuation of each."""

    model: Any
    prompts: list[list[int]]
    continuations: list[list[int]]
    ties: list[tuple[int, int, float]] = field(default_factory=list)

    def check(self, completions: Sequence[Completion], indices: Sequence[int] | None = None) -> int:
        """Compares token by token; returns how many ended in a proven tie."""
        indices = range(len(self.prompts)) if indices is None else indices
        assert len(completions) == len(indices)
        ties = 0
        for i, completion in zip(indices, completions, strict=True):
            assert completion.error is None, completion.error
            got, want = list(completion.token_ids), self.continuations[i]
            assert len(got) == len(want), f"prompt {i}: {completion.finish_reason}"
            if got == want:
                continue
            place = next(
                k for k, pair in enumerate(zip(got, want, strict=True)) if len({*pair}) > 1
            )
            margin = self._margin(i, place)
            assert margin < TIE, (
                f"prompt {i} differs at token {place}: {got[place]} instead of {want[place]}; "
                f"the oracle's margin there is {margin:.2e} of the logit"
            )
            self.ties.append((i, place, margin))
            ties += 1
        return ties

    def _margin(self, index: int, place: int) -> float:
        """The distance of the oracle's two best logits before token `place`."""
        ids = self.prompts[index] + self.continuations[index][:place]
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        return (best - second) / abs(best)


class KeptRunner(LocalRunner):
    """A runner that outlives its engines and shows them as many KV blocks as a test wants."""

    visible_blocks = 0  # 0: all

    @property
    def num_blocks(self) -> int:
        return self.visible_blocks or super().num_blocks

    def close(self) -> None:
        """The caches stay for the next engine."""


@dataclass
class LoadedModel:
    """A model loaded once, over which engines with other limits are started."""

    planned: PlannedModel
    runner: KeptRunner
    ops: BoundOps

    @contextmanager
    def engine(self, *, num_blocks: int = 0, **limits: Any) -> Iterator[Engine]:
        options = self.planned.options
        self.runner.visible_blocks = num_blocks
        config = {
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            **limits,
        }
        engine = Engine(
            "model",
            self.runner,
            load_tokenizer(self.planned.config),
            SchedulerConfig(**config),
            plan_json=self.planned.plan.to_dict(),
            op_calls=lambda: op_call_counts(self.ops),
        )
        try:
            yield engine
        finally:
            asyncio.run(engine.close())
            self.runner.visible_blocks = 0


def load_model(model: Path, registry: BackendRegistry, **options: Any) -> LoadedModel:
    """Plans and loads on one rank."""
    planned = plan_model(model, EngineOptions(**options), registry, WaiverBook())
    registry.create_runtime(planned.device)
    runner, ops = build_rank(planned, 0, None, options["num_blocks"], runner_type=KeptRunner)
    assert isinstance(runner, KeptRunner)
    return LoadedModel(planned, runner, ops)


def complete(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    *,
    count: int = NUM_NEW_TOKENS,
    in_flight: int = 64,
) -> list[Completion]:
    """Greedy continuations by an engine, `in_flight` at once."""
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    requests = [
        GenerationRequest(request_id=f"r{i}", prompt_token_ids=tuple(ids), sampling=sampling)
        for i, ids in enumerate(prompts)
    ]
    return generate_sync(engine, requests, max_in_flight=in_flight)
