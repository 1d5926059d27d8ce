"""What is measured: one definition of prefill and decode rates for every engine.

prefill rate   tokens of one long prompt / time to its first token.
decode rate    for a batch of B prompts, with T(n) the time to generate n tokens of each:
               B * (n - 1) / (T(n) - T(1)), so that the prompts' share is taken out in the same way
               for engines that report nothing in between.
Every call has prompts that no earlier call had, so that no prefix cache can help.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from contenders.process import ContenderError, ContenderProcess

FIRST_ORDINARY_TOKEN = 1000  # below are control tokens and single bytes
_ATTEMPTS = 3
Rates = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a run. batches: decode rows."""

    prefill_tokens: int = 512
    prefill_repeats: int = 3
    prompt_tokens: int = 128
    new_tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 16)

    @property
    def max_sequences(self) -> int:
        return max(self.batches)

    @property
    def max_length(self) -> int:
        return max(self.prefill_tokens, self.prompt_tokens) + self.new_tokens

    def rows(self) -> list[str]:
        """Names of what one turn gives."""
        return [f"prefill {self.prefill_tokens}", *(f"decode x{b}" for b in self.batches)]


class PromptSource:
    """Prompts of random ordinary tokens; equal seeds give equal prompts."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._draw = random.Random(seed)
        self._vocab_size = vocab_size

    def take(self, count: int, length: int) -> list[list[int]]:
        return [
            [self._draw.randrange(FIRST_ORDINARY_TOKEN, self._vocab_size) for _ in range(length)]
            for _ in range(count)
        ]


def warm_up(process: ContenderProcess, workload: Workload, source: PromptSource) -> None:
    """Every shape that will be measured once, untimed: compilation and packing happen here."""
    process.generate(source.take(1, workload.prefill_tokens), 1)
    for batch in workload.batches:
        process.generate(source.take(batch, workload.prompt_tokens), 4)


def measure_turn(process: ContenderProcess, workload: Workload, source: PromptSource) -> Rates:
    """One turn of one contender: tokens per second, by row name."""
    rows = iter(workload.rows())
    durations = sorted(
        process.generate(source.take(1, workload.prefill_tokens), 1)[0]
        for _ in range(workload.prefill_repeats)
    )
    rates = {next(rows): workload.prefill_tokens / durations[len(durations) // 2]}
    for batch in workload.batches:
        steps = workload.new_tokens - 1
        rates[next(rows)] = batch * steps / _decode_seconds(process, workload, source, batch)
    return rates


def _decode_seconds(
    process: ContenderProcess, workload: Workload, source: PromptSource, batch: int
) -> float:
    """Time of all steps but the first. A step takes no less time than as many tokens of a prompt:
    where it seems to, another's work fell into one of the two measurements, which are repeated.

    Raises ContenderError where that is so time and again.
    """
    for _ in range(_ATTEMPTS):
        first, _ = process.generate(source.take(batch, workload.prompt_tokens), 1)
        whole, _ = process.generate(source.take(batch, workload.prompt_tokens), workload.new_tokens)
        if whole - first >= first * (workload.new_tokens - 1) / workload.prompt_tokens:
            return whole - first
    raise ContenderError(
        f"decode x{batch}: required a whole run longer than its first token, found "
        f"{whole:.3f} s and {first:.3f} s after {_ATTEMPTS} attempts; measure on a quieter machine"
    )
