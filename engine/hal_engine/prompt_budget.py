"""How the tokens of a step are shared among prompts that do not all fit into it.

The oldest prompt goes first and takes what it lacks. One that lacks more than there is left takes
half of it and leaves the rest to those behind it, so that a short question is not held up by a
document of a minute's computation that came a moment earlier, while the oldest always has at least
half of each step: it takes at most twice the time that it would take alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal_engine.sequence import LiveSequence

# Smaller shares than this cost more in steps and in attention than they bring the one who waits.
LEAST_SHARE = 64


@dataclass(slots=True)
class PromptBudget:
    """What prompts may still take of a step: tokens, and rows of logits for prompt_logprobs."""

    tokens: int
    rows: int

    def share(self, wanted: int) -> int:
        """Tokens for a prompt that lacks `wanted`, and behind which others may come."""
        if wanted <= self.tokens:
            return wanted
        half = (self.tokens + 1) // 2
        return half if self.tokens - half >= LEAST_SHARE else self.tokens


@dataclass(slots=True)
class PromptChunk:
    """The tokens of one prompt in a step: `count` from `start` on."""

    sequence: LiveSequence
    start: int
    count: int = 0

    def grow(self, budget: PromptBudget, *, is_shared: bool) -> None:
        """Takes tokens of the budget; all that there are unless they are to be shared."""
        lacking = len(self.sequence.token_ids) - self.start - self.count
        if self.sequence.wants_prompt_rows:
            lacking = min(lacking, budget.rows)
        taken = budget.share(lacking) if is_shared else min(lacking, budget.tokens)
        if self.sequence.wants_prompt_rows:
            budget.rows -= taken
        budget.tokens -= taken
        self.count += taken
