"""The load of an audit: prompts that reach both phases and every planned range that can be reached.

A range of a plan is a number of tokens of one call. Which steps have it depends on the call: one
token a decoding sequence, the tokens of a chunk, the rows whose logits are wanted, the rows that
are cut by top-k or top-p. Waves of requests are made for one number each, and run one after the
other, so that nothing depends on timing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hal.ops.request import TokenRange
from hal.plan import PlannedOp
from hal_engine.api import GenerationRequest, SamplingParams
from hal_engine.planning import PlannedModel
from hal_engine.scheduler import SchedulerConfig

Counted = Literal["step", "decode", "prefill", "logits", "cut"]
_SHORT_PROMPT = 5  # tokens
_NEW_TOKENS = 4
_LONGEST_FOR_A_RANGE = 512  # a range that begins below is not reached at a larger number
_LOGIT_SITES = ("final_norm", "lm_head", "lm_head_all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Waves of requests, and the ranges that none of them can reach, with the reason."""

    waves: tuple[tuple[GenerationRequest, ...], ...]
    unreachable: dict[tuple[Counted, TokenRange], str]


def what_is_counted(op: PlannedOp) -> Counted:
    """What the number of tokens of a call is a number of."""
    request, site = op.site.request, op.site.site
    if request.phase == "decode":
        return "decode"
    if request.phase == "prefill":
        return "prefill"
    if site.startswith("sampler."):
        return "cut"
    return "logits" if site in _LOGIT_SITES else "step"


def synthetic_load(planned: PlannedModel, seed: int = 0) -> Load:
    """Waves for each planned range, then one of every kind of request together."""
    maker = _Maker(planned, seed)
    unreachable: dict[tuple[Counted, TokenRange], str] = {}
    sizes: dict[Counted, set[int]] = {}
    for counted, tokens in _ranges(planned.plan.ops):
        most, why = maker.most(counted)
        if tokens.low > most:
            unreachable[(counted, tokens)] = why
            continue
        last = min(tokens.high, most, max(tokens.low, _LONGEST_FOR_A_RANGE))
        sizes.setdefault(counted, set()).update((tokens.low, last))
    waves = [
        *(maker.decoding(n) for n in sorted(sizes.get("decode", set()) | sizes.get("cut", set()))),
        *(maker.prompt(n) for n in sorted(sizes.get("prefill", set()) | sizes.get("step", set()))),
        *(maker.scored(n) for n in sorted(sizes.get("logits", set())) if n > 1),
        *maker.mixed(),
    ]
    return Load(waves=tuple(tuple(wave) for wave in waves if wave), unreachable=unreachable)


def _ranges(ops: Iterable[PlannedOp]) -> list[tuple[Counted, TokenRange]]:
    return list(dict.fromkeys((what_is_counted(op), op.tokens) for op in ops))


def given_load(prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> Load:
    """Prompts of a user: all together, greedy and drawn in turn, then the first one again."""
    requests = [
        GenerationRequest(
            request_id=f"prompt-{number}",
            prompt_token_ids=tuple(ids),
            sampling=_drawn(number, max_tokens) if number % 2 else _greedy(max_tokens),
        )
        for number, ids in enumerate(prompts)
    ]
    again = GenerationRequest(
        request_id="prompt-0-again",
        prompt_token_ids=requests[0].prompt_token_ids,
        sampling=_drawn(0, max_tokens),
    )
    return Load(waves=(tuple(requests), (again,)), unreachable={})


class _Maker:
    """Makes requests of random tokens; no two prompts begin alike, unless they are to."""

    def __init__(self, planned: PlannedModel, seed: int) -> None:
        self._options = planned.options
        self._context = planned.max_model_len
        self._vocab_size = planned.config.vocab_size
        self._random = random.Random(seed)
        self._rows = SchedulerConfig().max_prompt_logits_rows
        self._count = 0

    def most(self, counted: Counted) -> tuple[int, str]:
        """The most tokens that a call can have, and what sets that."""
        seqs, batched = self._options.max_num_seqs, self._options.max_num_batched_tokens
        if counted in ("decode", "cut"):
            return seqs, f"at most {seqs} sequences run in a step (max_num_seqs)"
        if counted == "logits":
            scored = min(self._rows, self._context - 1)
            most = max(seqs, scored)
            return most, (
                f"at most {most} rows of a step have logits: one a sequence (max_num_seqs "
                f"{seqs}), or {scored} of a prompt that is scored"
            )
        most = min(batched, self._context - 1) if counted == "prefill" else batched
        return most, f"the longest prompt has {most} tokens (max_model_len {self._context})"

    def decoding(self, count: int) -> list[GenerationRequest]:
        """So many sequences that decode together, all of them drawn with top-k and top-p."""
        steps = -(-count * _SHORT_PROMPT // self._options.max_num_batched_tokens)
        return [
            self._request(self._ids(_SHORT_PROMPT), _drawn(number, _NEW_TOKENS + steps))
            for number in range(count)
        ]

    def prompt(self, length: int) -> list[GenerationRequest]:
        """Prompts whose first chunks together have so many tokens."""
        lengths = []
        while length > 0:
            lengths.append(min(length, self._context - 1))
            length -= lengths[-1]
        return [self._request(self._ids(n), _greedy(1)) for n in lengths]

    def scored(self, rows: int) -> list[GenerationRequest]:
        """One step with logits for so many rows."""
        length = min(rows, self._context - 1, self._rows)
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
        return [self._request(self._ids(length), params)]

    def mixed(self) -> list[list[GenerationRequest]]:
        """A prompt in several chunks beside decoding sequences of every kind; then its beginning
        again, whose blocks are shared."""
        longest = min(self._context - 16, 3 * self._options.max_num_batched_tokens // 2)
        kinds = [
            _greedy(8),
            _drawn(1, 8),
            SamplingParams(max_tokens=8, temperature=1.2, min_p=0.05, logprobs=2, ignore_eos=True),
            SamplingParams(max_tokens=8, repetition_penalty=1.1, logit_bias={3: -2.0}),
        ]
        room = max(1, self._options.max_num_seqs)
        first = [self._request(self._ids(7 + number), kind) for number, kind in enumerate(kinds)]
        first = first[:room]
        if longest < 32:
            return [first]
        ids = self._ids(longest)
        again = [self._request((*ids[: longest // 2], 1, 2, 3), kind) for kind in kinds[:2]]
        return [[*first, self._request(ids, _greedy(8))], again[:room]]

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(count))

    def _request(self, ids: tuple[int, ...], sampling: SamplingParams) -> GenerationRequest:
        self._count += 1
        return GenerationRequest(
            request_id=f"audit-{self._count}", prompt_token_ids=ids, sampling=sampling
        )


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def _drawn(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True
    )
