"""What an audit costs: decoding with transformers without one, in light mode and in full mode.

    python benchmarks/audit_overhead.py [--quick] [--tokens 256] [--rounds 3] [--json FILE]

A Llama of SmolLM2-135M's sizes with random weights, batch 1, greedy, KV cache, float32. The three
take turns in one process, in changing order; shown are medians of milliseconds a token and their
ratios to the run without. Full mode decodes few tokens, because each costs the same.

Beside the ratio of light mode, of a run of that many tokens, stands what it is made of: the
first steps, which are always observed and cost the same however long the run is, and the begin and
the end of the audit, which no token waits for. Goal: light at most 5%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contenders.machine import load_average, machine_facts
from contenders.report import today
from transformers import LlamaConfig, LlamaForCausalLM

import hal

GOAL_LIGHT = 0.05
MODES = ("without", "light", "full")
FULL_TOKENS = 16
FIRST_STEPS = 3
"""The prompt, the first token behind it, and the step that ends the second cycle."""


def create_model(layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's sizes, random weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def decode(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds of so many tokens, prompt included."""
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return time.perf_counter() - begin


def observed(mode: str) -> AbstractContextManager[Any]:
    """The audit of a mode."""
    if mode == "without":
        return nullcontext()
    return hal.audit(mode="light" if mode == "light" else "full")


@dataclass(slots=True)
class Times:
    """Seconds of each round: of a token, of the first steps, of begin and end of the audit."""

    token: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    notes: str = ""


def one_turn(times: Times, mode: str, model: LlamaForCausalLM, tokens: int) -> None:
    """One run of a mode, and one of its first steps alone."""
    prompt = torch.randint(0, 49152, (1, 16))
    begin = time.perf_counter()
    with observed(mode) as report:
        seconds = decode(model, prompt, tokens)
    times.token.append(seconds / tokens)
    times.around.append(time.perf_counter() - begin - seconds)
    if report is not None:
        times.notes = "; ".join(report.result.notes)
    if mode != "full":
        with observed(mode):
            times.first.append(decode(model, prompt, FIRST_STEPS))


def measure(model: LlamaForCausalLM, tokens: int, rounds: int) -> dict[str, Times]:
    """All modes in turns."""
    decode(model, torch.randint(0, 49152, (1, 16)), 4)
    times = {mode: Times() for mode in MODES}
    for number in range(rounds):
        first = number % len(MODES)
        for mode in MODES[first:] + MODES[:first]:
            one_turn(times[mode], mode, model, FULL_TOKENS if mode == "full" else tokens)
    return times


def results_of(times: dict[str, Times]) -> dict[str, dict[str, Any]]:
    """Medians in ms, and what is above the run without."""
    base = statistics.median(times["without"].token)
    first = statistics.median(times["without"].first)
    results: dict[str, dict[str, Any]] = {}
    for mode, found in times.items():
        token = statistics.median(found.token)
        results[mode] = {
            "ms": round(token * 1e3, 3),
            "lowest_ms": round(min(found.token) * 1e3, 3),
            "highest_ms": round(max(found.token) * 1e3, 3),
            "above": round(token / base - 1.0, 4),
            "begin_and_end_ms": round(statistics.median(found.around) * 1e3, 1),
        }
        if found.first:
            fixed = statistics.median(found.first) - first
            results[mode]["first_steps_ms"] = round(fixed * 1e3, 1)
        if found.notes:
            results[mode]["notes"] = found.notes
    return results


def show(results: dict[str, dict[str, Any]], tokens: int) -> None:
    """The results as text."""
    for mode, row in results.items():
        spread = f"{row['lowest_ms']:.1f} to {row['highest_ms']:.1f}"
        print(f"{mode:8} {row['ms']:8.2f} ms a token ({spread}), {row['above']:+7.1%}")
    light = results["light"]
    share = light["first_steps_ms"] / (results["without"]["ms"] * tokens)
    print(
        f"light: its first steps cost {light['first_steps_ms']:.0f} ms once, {share:.1%} of "
        f"{tokens} tokens; its begin and end {light['begin_and_end_ms']:.0f} ms"
    )
    for mode, row in results.items():
        if "notes" in row:
            print(f"{mode}: {row['notes']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = load_average()
    rounds = 1 if options.quick else options.rounds
    results = results_of(measure(create_model(options.layers), options.tokens, rounds))
    print(f"{options.tokens} tokens, {options.layers} layers, {rounds} rounds")
    show(results, options.tokens)
    document = {
        "date": today(),
        "machine": machine_facts(),
        "load": {"before": before, "after": load_average()},
        "tokens": options.tokens,
        "layers": options.layers,
        "rounds": rounds,
        "goal_light": GOAL_LIGHT,
        "modes": results,
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
