"""Logits to tokens.

A step in which every request is greedy and asks for nothing else costs one argmax and no copy.
Only rows that a penalty, a bias, a grammar or top-k/top-p changes are copied, and edited together;
a row's result never depends on its neighbours.

Log-probabilities are those of the *model's own* distribution: before penalties, bias, grammar and
temperature (as OpenAI's API and vLLM's default do).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal_engine import logits_processors as processors
from hal_engine.api import Failure, SamplingParams
from hal_engine.drawing import TokenLogprobs, argmax, compute_logprobs, draw_tokens
from hal_engine.structured_output import GrammarMatcher

if TYPE_CHECKING:
    import torch

TopKTopP = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: nothing but the likeliest token would be drawn


@dataclass(slots=True)
class SamplerState:
    """What one sequence carries from draw to draw. Survives preemption."""

    params: SamplingParams
    stop_token_ids: frozenset[int]  # end the sequence when drawn; banned before min_tokens
    generator: torch.Generator | None  # None is greedy
    counts: processors.TokenCounts | None  # None without penalties
    grammar: GrammarMatcher | None
    has_edits: bool  # something changes its logits before the draw
    is_plain: bool  # an argmax is all it needs


@dataclass(slots=True)
class SampledTokens:
    """One step. `token_ids[i]` means nothing where `errors` has i."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Failure] = field(default_factory=dict)


def create_sampler_state(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    eos_token_ids: frozenset[int],
    grammar: GrammarMatcher | None = None,
) -> SamplerState:
    """The state before the first draw. Without a seed one is drawn from the system."""
    import torch

    generator = None
    if params.temperature >= GREEDY_BELOW:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generator = torch.Generator().manual_seed(seed & (2**64 - 1))
    has_penalty = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
    has_edits = (
        has_penalty or bool(params.logit_bias) or params.min_tokens > 0 or grammar is not None
    )
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
    return SamplerState(
        params=params,
        stop_token_ids=stops,
        generator=generator,
        counts=processors.TokenCounts(prompt_token_ids) if has_penalty else None,
        grammar=grammar,
        has_edits=has_edits,
        is_plain=generator is None and not has_edits and params.logprobs is None,
    )


class Sampler:
    """Stateless but for the bound op `sample.top_k_top_p` it is given."""

    def __init__(self, top_k_top_p: TopKTopP) -> None:
        self._top_k_top_p = top_k_top_p

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplerState],
        num_generated: Sequence[int],
    ) -> SampledTokens:
        """Draws one token for each row of fp32 logits [B, V], which stay as they are.

        `num_generated[i]` counts the tokens that row i's sequence has generated so far. A row whose
        logits are not finite (NaN, +inf, or nothing but -inf) is reported in `errors`.
        """
        token_ids, errors = argmax(logits)
        result = SampledTokens(token_ids, errors=errors)
        if all(state.is_plain for state in states):
            return result
        edited = [i for i, s in enumerate(states) if s.has_edits and i not in errors]
        if edited:
            self._sample_edited(logits, edited, states, num_generated, result)
        drawn = [
            i
            for i, s in enumerate(states)
            if s.generator is not None and not s.has_edits and i not in errors
        ]
        if drawn:
            tokens = self._draw(logits, drawn, [states[i] for i in drawn])
            for i, token in zip(drawn, tokens, strict=True):
                token_ids[i] = token
        _add_logprobs(logits, states, result)
        for i, state in enumerate(states):
            if state.counts is not None and i not in errors:
                state.counts.add(token_ids[i])
        return result

    def _sample_edited(
        self,
        logits: torch.Tensor,
        rows: list[int],
        states: Sequence[SamplerState],
        num_generated: Sequence[int],
        result: SampledTokens,
    ) -> None:
        """Copies the rows, applies what each asks for, then takes the best or draws."""
        import torch

        chosen = [states[i] for i in rows]
        edited = logits[torch.tensor(rows, device=logits.device)]
        processors.apply_penalties(edited, chosen)
        processors.apply_logit_bias(edited, chosen)
        processors.ban_early_stops(edited, chosen, [num_generated[i] for i in rows])
        failed = processors.apply_grammars(edited, chosen)
        best, empty = argmax(edited)
        for j, i in enumerate(rows):
            result.token_ids[i] = best[j]
            if j in failed:
                result.errors[i] = failed[j]
            elif j in empty:
                result.errors[i] = Failure(
                    "request",
                    "sampling: no token is left after penalties, logit bias, min_tokens and "
                    "grammar; loosen one of them",
                )
        drawn = [
            j
            for j, i in enumerate(rows)
            if chosen[j].generator is not None and i not in result.errors
        ]
        if drawn:
            tokens = self._draw(edited, drawn, [chosen[j] for j in drawn])
            for j, token in zip(drawn, tokens, strict=True):
                result.token_ids[rows[j]] = token

    def _draw(self, logits: torch.Tensor, rows: list[int], states: list[SamplerState]) -> list[int]:
        """Temperature, top-k and top-p, min-p, then one draw; `states[j]` is of `rows[j]`."""
        vocab_size = logits.shape[1]
        tokens = [0] * len(rows)
        cut = [
            j for j, s in enumerate(states) if 0 < s.params.top_k < vocab_size or s.params.top_p < 1
        ]
        if cut:
            kept = self._keep_top(logits, [rows[j] for j in cut], [states[j] for j in cut])
            drawn = _draw_rows(kept, range(len(cut)), [states[j] for j in cut], scaled=True)
            for j, token in zip(cut, drawn, strict=True):
                tokens[j] = token
        whole = sorted(set(range(len(rows))) - set(cut))
        if whole:
            drawn = _draw_rows(
                logits, [rows[j] for j in whole], [states[j] for j in whole], scaled=False
            )
            for j, token in zip(whole, drawn, strict=True):
                tokens[j] = token
        return tokens

    def _keep_top(
        self, logits: torch.Tensor, rows: list[int], states: list[SamplerState]
    ) -> torch.Tensor:
        """The rows after temperature and the bound op."""
        import torch

        device, vocab_size = logits.device, logits.shape[1]
        params = [state.params for state in states]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        copy = logits[torch.tensor(rows, device=device)]
        processors.apply_temperature(copy, temperature.to(device))
        return self._top_k_top_p(
            copy,
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        )


def _draw_rows(
    logits: torch.Tensor, rows: Sequence[int], states: Sequence[SamplerState], *, scaled: bool
) -> list[int]:
    return draw_tokens(
        logits,
        rows,
        [1.0 if scaled else state.params.temperature for state in states],
        [state.params.min_p for state in states],
        [state.generator for state in states if state.generator is not None],
    )


def _add_logprobs(
    logits: torch.Tensor, states: Sequence[SamplerState], result: SampledTokens
) -> None:
    rows: list[int] = []
    counts: list[int] = []
    for i, state in enumerate(states):
        if state.params.logprobs is not None and i not in result.errors:
            rows.append(i)
            counts.append(state.params.logprobs)
    if rows:
        tokens = [result.token_ids[i] for i in rows]
        values = compute_logprobs(logits, rows, tokens, counts)
        result.logprobs.update(zip(rows, values, strict=True))
