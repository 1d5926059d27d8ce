"""What changes the model's distribution before a token is drawn, a batch of rows at a time.

Each function edits fp32 logits [B, V] in place; `states[i]` belongs to row i. The order in which
the sampler applies them: repetition, presence and frequency penalty, logit bias, min_tokens,
grammar, temperature, top-k and top-p (a bound op), min-p (in `drawing`, on the weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hal_engine.api import Failure
from hal_engine.structured_output import GrammarError

if TYPE_CHECKING:
    import torch

    from hal_engine.sampler import SamplerState

NEGATIVE_INFINITY = float("-inf")


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated.

    Grows with the sequence, one dictionary look-up per token, so that a step builds nothing.
    """

    __slots__ = ("_counts", "_ids", "_index_of", "_size")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_token_ids)
        self._index_of = {token: i for i, token in enumerate(distinct)}
        self._size = len(distinct)
        capacity = self._size + 64
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: self._size] = list(distinct)
        self._counts = np.zeros(capacity, dtype=np.float32)

    def add(self, token_id: int) -> None:
        """Records a generated token."""
        index = self._index_of.get(token_id)
        if index is None:
            index = self._size
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._index_of[token_id] = index
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Generated occurrences of each of `ids`: 0 for a token of the prompt only."""
        return self._counts[: self._size]


def apply_penalties(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Repetition (CTRL, arXiv:1909.05858: divide if positive, else multiply), then OpenAI's
    presence and frequency penalty, over generated tokens only."""
    import torch

    vocab_size = logits.shape[1]
    flat: list[npt.NDArray[np.int64]] = []
    repetition: list[npt.NDArray[np.float32]] = []
    subtract: list[npt.NDArray[np.float32]] = []
    for row, state in enumerate(states):
        if state.counts is None:
            continue
        params = state.params
        counts = state.counts.counts
        flat.append(state.counts.ids + row * vocab_size)
        repetition.append(np.full(len(counts), params.repetition_penalty, dtype=np.float32))
        present = (counts > 0).astype(np.float32)
        subtract.append(
            np.float32(params.frequency_penalty) * counts
            + np.float32(params.presence_penalty) * present
        )
    if not flat:
        return
    device = logits.device
    index = torch.from_numpy(np.concatenate(flat)).to(device)
    factor = torch.from_numpy(np.concatenate(repetition)).to(device)
    values = logits.view(-1)[index]
    values = torch.where(values > 0, values / factor, values * factor)
    values -= torch.from_numpy(np.concatenate(subtract)).to(device)
    logits.view(-1)[index] = values


def apply_logit_bias(logits: torch.Tensor, states: Sequence[SamplerState]) -> None:
    """Adds each request's bias to its tokens."""
    import torch

    vocab_size = logits.shape[1]
    rows = [(row, s.params.logit_bias) for row, s in enumerate(states) if s.params.logit_bias]
    if not rows:
        return
    flat = [row * vocab_size + token for row, bias in rows for token in bias]
    values = [value for _, bias in rows for value in bias.values()]
    index = torch.tensor(flat, dtype=torch.int64, device=logits.device)
    logits.view(-1)[index] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def ban_early_stops(
    logits: torch.Tensor, states: Sequence[SamplerState], num_generated: Sequence[int]
) -> None:
    """Bans the tokens that would end a sequence before its min_tokens."""
    import torch

    vocab_size = logits.shape[1]
    flat = [
        row * vocab_size + token
        for row, state in enumerate(states)
        if num_generated[row] < state.params.min_tokens
        for token in state.stop_token_ids
    ]
    if flat:
        index = torch.tensor(flat, dtype=torch.int64, device=logits.device)
        logits.view(-1)[index] = NEGATIVE_INFINITY


def apply_grammars(logits: torch.Tensor, states: Sequence[SamplerState]) -> dict[int, Failure]:
    """Bans what the grammars do not allow; returns the rows whose grammar failed, and why."""
    import torch

    vocab_size = logits.shape[1]
    errors: dict[int, Failure] = {}
    rows: list[int] = []
    masks: list[npt.NDArray[np.bool_]] = []
    for row, state in enumerate(states):
        if state.grammar is None:
            continue
        try:
            packed = state.grammar.bitmask()
        except GrammarError as error:
            errors[row] = error.failure()
            continue
        allowed = np.unpackbits(packed, count=min(vocab_size, packed.size * 8), bitorder="little")
        banned = np.ones(vocab_size, dtype=np.bool_)  # ids beyond the tokenizer's stay banned
        np.equal(allowed, 0, out=banned[: allowed.size])
        rows.append(row)
        masks.append(banned)
    if rows:
        mask = torch.from_numpy(np.stack(masks)).to(logits.device)
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(mask, NEGATIVE_INFINITY)
    return errors


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> None:
    """temperature fp32 [B], above 0. Shifted by the maximum first: no temperature overflows."""
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= temperature[:, None]
