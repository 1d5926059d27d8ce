"""The sizes of a step that requests depend on."""

from __future__ import annotations

from dataclasses import dataclass

from hal.ops.request import Phase, TokenRange


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """context_tokens: the context length that estimates assume. attends_sparsely: False makes
    models with an indexer attend to all keys, which is another arithmetic."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    context_tokens: int = 1024
    attends_sparsely: bool = True

    @property
    def all_tokens(self) -> TokenRange:
        return TokenRange(1, self.max_num_batched_tokens)

    def tokens_of(self, phase: Phase) -> TokenRange:
        """A decode step has one token a sequence."""
        return TokenRange(1, self.max_num_seqs) if phase == "decode" else self.all_tokens
