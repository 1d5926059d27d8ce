"""Runs one model on two devices and prints, as JSON, what each said and what ran.

Started by a test in an environment where halstack and a plug-in are installed as wheels; imports
nothing of the checkout. Arguments: model, device, device.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hal.binding import BoundOps
from hal.dispatch_spy import DispatchSpy
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_rank
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.runner import LocalRunner
from hal_engine.tokenizer import load_tokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
NEW_TOKENS = 10
BLOCK_SIZE = 16
NUM_BLOCKS = 256


class Greedy:
    """A model on one device, asked for one prompt after the other and for all together."""

    def __init__(self, model: Path, device: str, registry: BackendRegistry) -> None:
        options = EngineOptions(
            device=device, precision="fp32", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
        )
        planned = plan_model(model, options, registry, WaiverBook())
        registry.create_runtime(planned.device)
        self.spy = DispatchSpy()
        self.runner, self.ops = build_rank(
            planned,
            0,
            None,
            NUM_BLOCKS,
            ops=BoundOps(planned.plan, wrap=self.spy.wrap),
            runner_type=LocalRunner,
        )
        self.tokenizer = load_tokenizer(planned.config)
        self.choices = sorted({op.choice.name for op in planned.plan.ops})

    def run(self, batch: Batch, *, is_spied: bool) -> torch.Tensor:
        with self.spy if is_spied else nullcontext():
            return self.runner.execute(batch).clone()

    def generate(
        self, prompts: list[list[int]], *, is_spied: bool = False
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """New tokens a prompt, and the logits of every position that was computed for it."""
        tables, free = [], 0
        for prompt in prompts:
            count = -(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE)
            tables.append(list(range(free, free + count)))
            free += count
        batch = Batch(
            prefill=[
                ScheduledSequence(n, ids, 0, table, "all")
                for n, (ids, table) in enumerate(zip(prompts, tables, strict=True))
            ]
        )
        rows = list(self.run(batch, is_spied=is_spied).split([len(prompt) for prompt in prompts]))
        new: list[list[int]] = [[int(row[-1].argmax())] for row in rows]
        for step in range(NEW_TOKENS - 1):
            batch = Batch(
                decode=[
                    ScheduledSequence(n, [new[n][-1]], len(ids) + step, tables[n], "last")
                    for n, ids in enumerate(prompts)
                ]
            )
            for n, row in enumerate(self.run(batch, is_spied=is_spied)):
                new[n].append(int(row.argmax()))
                rows[n] = torch.cat((rows[n], row[None]))
        return new, rows

    def report(self) -> dict[str, Any]:
        calls: dict[str, int] = {}
        for count in self.ops.counts():
            calls[count.implementation] = calls.get(count.implementation, 0) + count.calls
        return {
            "choices": self.choices,
            "calls": calls,
            "escaped": [f"{call.op} at {call.location}" for call in self.spy.escaped],
            "torch_ops_inside": sorted({op for ops in self.spy.leaf_ops.values() for op in ops}),
        }


def main(model: Path, first: str, second: str) -> None:
    registry = load_backends()
    runs = {}
    for device in (first, second):
        greedy = Greedy(model, device, registry)
        prompts = [
            greedy.tokenizer.encode(text, add_special_tokens=True, parse_special=True)
            for text in PROMPTS
        ]
        start = time.perf_counter()
        alone = [greedy.generate([prompt]) for prompt in prompts]
        together, _ = greedy.generate(prompts, is_spied=True)
        runs[device] = greedy.report() | {
            "tokens": [tokens[0] for tokens, _ in alone],
            "tokens_together": together,
            "rows": [rows[0] for _, rows in alone],
            "seconds": time.perf_counter() - start,
        }
        runs[device]["text"] = greedy.tokenizer.decode(
            runs[device]["tokens"][0], skip_special_tokens=True
        )
    pairs = list(zip(runs[first].pop("rows"), runs[second].pop("rows"), strict=True))
    document = {
        "prompts": PROMPTS,
        "devices": runs,
        # In units of 1 + |logit|: the larger of an absolute and a relative difference.
        "largest_difference": max(float(((a - b).abs() / (1 + a.abs())).max()) for a, b in pairs),
        "smallest_lead": min(
            float((top[:, 0] - top[:, 1]).min()) for top in (a.topk(2).values for a, _ in pairs)
        ),
    }
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
