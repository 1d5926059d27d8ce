"""Logits to tokens.

A step in which every request is greedy and asks for nothing else costs one argmax and no copy. Rows
that ask for more are copied, edited together and drawn together; a row's result never depends on
its neighbours.

Log-probabilities are those of the *model's own* distribution: before penalties, bias, grammar and
temperature (as OpenAI's API and vLLM's default do).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hal_engine import logits_processors as processors
from hal_engine.api import SamplingParams, TokenLogprob
from hal_engine.structured_output import GrammarMatcher

if TYPE_CHECKING:
    import torch

TopKTopP = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: nothing but the likeliest token would be drawn
_CHUNK = 256  # inverse-CDF sampling sums this many weights at once


@dataclass(slots=True)
class SamplerState:
    """What one sequence carries from draw to draw. Survives preemption."""

    params: SamplingParams
    stop_token_ids: frozenset[int]  # end the sequence when drawn; banned before min_tokens
    generator: torch.Generator | None  # None is greedy
    counts: processors.TokenCounts | None  # None without penalties
    grammar: GrammarMatcher | None
    is_plain: bool  # an argmax is all it needs


@dataclass(slots=True)
class TokenLogprobs:
    """Of one drawn token."""

    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class SampledTokens:
    """One step. `token_ids[i]` means nothing where `errors` has i."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


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
    stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
    return SamplerState(
        params=params,
        stop_token_ids=stops,
        generator=generator,
        counts=processors.TokenCounts(prompt_token_ids) if has_penalty else None,
        grammar=grammar,
        is_plain=(
            generator is None
            and not has_penalty
            and not params.logit_bias
            and params.min_tokens == 0
            and params.logprobs is None
            and grammar is None
        ),
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
        token_ids, errors = _argmax(logits)
        result = SampledTokens(token_ids, errors=errors)
        rest = [i for i, s in enumerate(states) if not s.is_plain and i not in errors]
        if rest:
            self._sample_rows(logits, rest, states, num_generated, result)
        for i, state in enumerate(states):
            if state.counts is not None and i not in errors:
                state.counts.add(token_ids[i])
        return result

    def _sample_rows(
        self,
        logits: torch.Tensor,
        rows: list[int],
        states: Sequence[SamplerState],
        num_generated: Sequence[int],
        result: SampledTokens,
    ) -> None:
        import torch

        chosen = [states[i] for i in rows]
        raw = logits[torch.tensor(rows, device=logits.device)]
        edited = raw.clone() if any(s.params.logprobs is not None for s in chosen) else raw
        processors.apply_penalties(edited, chosen)
        processors.apply_logit_bias(edited, chosen)
        processors.ban_early_stops(edited, chosen, [num_generated[i] for i in rows])
        failed = processors.apply_grammars(edited, chosen)
        best, errors = _argmax(edited)
        for j, i in enumerate(rows):
            result.token_ids[i] = best[j]
            if j in failed:
                result.errors[i] = failed[j]
            elif j in errors:
                result.errors[i] = (
                    "sampling: no token is left after penalties, logit bias, min_tokens and grammar"
                )
        drawn = [j for j, i in enumerate(rows) if chosen[j].generator and i not in result.errors]
        if drawn:
            tokens = self._draw(edited, drawn, chosen)
            for j, token in zip(drawn, tokens, strict=True):
                result.token_ids[rows[j]] = token
        self._add_logprobs(raw, rows, chosen, result)

    def _draw(
        self, edited: torch.Tensor, rows: list[int], states: Sequence[SamplerState]
    ) -> list[int]:
        """Temperature, top-k, top-p, min-p, then one draw per row."""
        import torch

        device = edited.device
        params = [states[j].params for j in rows]
        logits = edited if len(rows) == len(states) else edited[torch.tensor(rows, device=device)]
        temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        processors.apply_temperature(logits, temperature.to(device))
        logits = self._keep_top(logits, params)
        if any(p.min_p > 0 for p in params):
            min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32)
            processors.apply_min_p(logits, min_p.to(device))
        generators = [g for j in rows if (g := states[j].generator) is not None]
        return _draw_tokens(logits, generators)

    def _keep_top(self, logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        """Calls the bound op on the rows that ask for top-k or top-p."""
        import torch

        vocab_size = logits.shape[1]
        rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1]
        if not rows:
            return logits
        device = logits.device
        top_k = [min(params[i].top_k or vocab_size, vocab_size) for i in rows]
        top_p = [params[i].top_p for i in rows]
        index = torch.tensor(rows, device=device)
        everything = len(rows) == len(params)
        kept = self._top_k_top_p(
            logits if everything else logits[index],
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float32, device=device),
        )
        if everything:
            return kept
        logits[index] = kept
        return logits

    def _add_logprobs(
        self,
        raw: torch.Tensor,
        rows: list[int],
        states: Sequence[SamplerState],
        result: SampledTokens,
    ) -> None:
        wanted = [
            j
            for j, i in enumerate(rows)
            if states[j].params.logprobs is not None and i not in result.errors
        ]
        if not wanted:
            return
        import torch

        tokens = [result.token_ids[rows[j]] for j in wanted]
        counts = [states[j].params.logprobs or 0 for j in wanted]
        values = compute_logprobs(raw[torch.tensor(wanted, device=raw.device)], tokens, counts)
        for j, value in zip(wanted, values, strict=True):
            result.logprobs[rows[j]] = value


def compute_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], top_counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probability of one token per row of logits [B, V], and of the row's likeliest ones."""
    import torch

    normalizer = torch.logsumexp(logits, dim=-1)
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    own = (logits.gather(1, index[:, None])[:, 0] - normalizer).tolist()
    most = max(top_counts, default=0)
    if most == 0:
        return [TokenLogprobs(value, ()) for value in own]
    values, ids = torch.topk(logits, min(most, logits.shape[1]), dim=-1)
    tops = zip(ids.tolist(), (values - normalizer[:, None]).tolist(), strict=True)
    return [
        TokenLogprobs(
            value,
            tuple(TokenLogprob(t, v) for t, v in zip(top[:count], logs[:count], strict=True)),
        )
        for value, count, (top, logs) in zip(own, top_counts, tops, strict=True)
    ]


def _argmax(logits: torch.Tensor) -> tuple[list[int], dict[int, str]]:
    """The likeliest token of each row (of equals, the lowest id), and the rows without one."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised: 0.13 ms for 16 rows of 49152, where torch takes 1.5 ms.
        array = logits.numpy()
        index = array.argmax(axis=-1)
        best = array[np.arange(len(array)), index]
    else:
        values, positions = logits.max(dim=-1)
        index, best = positions.cpu().numpy(), values.cpu().numpy()
    errors: dict[int, str] = {}
    finite = np.isfinite(best)  # a NaN or +inf anywhere in a row is its maximum
    if not finite.all():
        for i in np.flatnonzero(~finite).tolist():
            errors[i] = (
                "the model's logits must be finite, found "
                + ("only -inf" if best[i] == -np.inf else str(best[i]))
                + f" (token {index[i]}); the weights or a kernel are broken"
            )
    return index.tolist(), errors


def _draw_tokens(logits: torch.Tensor, generators: Sequence[torch.Generator]) -> list[int]:
    """One token per row by inverse CDF: a single uniform number from each row's own generator.

    The cumulative sum runs over chunks first and then inside one chunk: fp64 where it matters,
    without an fp64 copy of the row.
    """
    import torch

    rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    weights = logits.new_zeros(rows, num_chunks * _CHUNK)
    weights[:, :vocab_size] = (logits - logits.amax(dim=-1, keepdim=True)).exp_()
    chunks = weights.view(rows, num_chunks, _CHUNK)
    cumulative = chunks.sum(dim=-1).double().cumsum(dim=-1)
    uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    target = uniform.to(logits.device) * cumulative[:, -1]
    chunk = (cumulative <= target[:, None]).sum(dim=-1).clamp_(max=num_chunks - 1)
    row = torch.arange(rows, device=logits.device)
    before = torch.where(chunk > 0, cumulative[row, (chunk - 1).clamp_(min=0)], 0.0)
    inner = chunks[row, chunk].double()
    offset = (inner.cumsum(dim=-1) <= (target - before)[:, None]).sum(dim=-1)
    # Rounding may put the target behind the chunk's last weight: its likeliest token then.
    offset = torch.where(offset < _CHUNK, offset, inner.argmax(dim=-1))
    return [int(token) for token in (chunk * _CHUNK + offset).tolist()]
