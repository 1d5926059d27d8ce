"""What an audit costs: decoding with transformers without one, in light mode and in full mode.

    python benchmarks/audit_overhead.py [--layers 30] [--tokens 64] [--rounds 5]

A Llama of SmolLM2-135M's sizes with random weights, batch 1, greedy, KV cache, float32. The three
take turns in one process, in changing order; shown are medians of seconds a token and their ratios
to the run without. The first two steps of an audit are always observed, so short runs cost more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hal

MODES = ("without", "light", "full")


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
    """Seconds a token, prompt included."""
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return (time.perf_counter() - begin) / tokens


def observed(mode: str) -> AbstractContextManager[Any]:
    """The audit of a mode."""
    return (
        nullcontext()
        if mode == "without"
        else hal.audit(mode="light" if mode == "light" else "full")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = create_model(options.layers)
    prompt = torch.randint(0, 49152, (1, 16))
    decode(model, prompt, 4)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    notes: dict[str, str] = {}
    for _ in range(options.rounds):
        for mode in random.sample(MODES, len(MODES)):
            with observed(mode) as report:
                times[mode].append(decode(model, prompt, options.tokens))
            if report is not None:
                notes[mode] = "; ".join(report.result.notes)
    base = statistics.median(times["without"])
    print(f"{options.tokens} tokens, {options.layers} layers, {options.rounds} rounds")
    for mode in MODES:
        median = statistics.median(times[mode])
        spread = f"{min(times[mode]) * 1e3:.1f} to {max(times[mode]) * 1e3:.1f}"
        print(
            f"{mode:8} {median * 1e3:7.2f} ms a token ({spread}), {median / base:5.3f} of without"
        )
    for mode, note in notes.items():
        print(f"{mode}: {note}")


if __name__ == "__main__":
    main()
