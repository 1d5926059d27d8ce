"""Each processor against transformers' own, the draws against their distribution."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hal_engine import logits_processors as processors
from hal_engine.api import Failure, SamplingParams
from hal_engine.drawing import compute_logprobs, draw_batch, draw_row, row_weights, top_tokens
from hal_engine.sampler import Sampler, SamplerState, create_sampler_state
from hal_engine.structured_output import GrammarError

V = 1000
EOS = frozenset({3})
NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


@pytest.fixture
def sampler(fake_runner: Any) -> Sampler:
    return Sampler(fake_runner().top_k_top_p)


def state(prompt: list[int] | None = None, grammar: Any = None, **params: Any) -> SamplerState:
    return create_sampler_state(SamplingParams(**params), prompt or [1], EOS, grammar)


def random_logits(rows: int, seed: int, vocab_size: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def draws(sampler: Sampler, logits: torch.Tensor, states: list[SamplerState]) -> list[int]:
    result = sampler.sample(logits, states, [0] * len(states))
    assert not result.errors
    return result.token_ids


def kept(sampler: Sampler, row: torch.Tensor, count: int = 400, **params: Any) -> set[int]:
    """Tokens ever drawn from one row."""
    states = [state(seed=i, temperature=1.0, **params) for i in range(count)]
    return set(draws(sampler, row.expand(count, -1).contiguous(), states))


def test_repetition_penalty_is_transformers(sampler: Sampler) -> None:
    logits = random_logits(3, 1)
    prompt, generated = [5, 9, 700, 5], [2, 9, 9]
    states = [state(prompt, repetition_penalty=1.7), state(), state([8], repetition_penalty=0.6)]
    for token in generated:
        states[0].counts.add(token)  # type: ignore[union-attr]
    mine = logits.clone()
    processors.apply_penalties(mine, states)
    for row, ids, penalty in [(0, prompt + generated, 1.7), (2, [8], 0.6)]:
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([ids]), logits[row : row + 1].clone()
        )
        torch.testing.assert_close(mine[row], theirs[0], rtol=1e-6, atol=0)
    assert torch.equal(mine[1], logits[1])


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = random_logits(1, 2)
    it = state([5, 5, 5], presence_penalty=0.5, frequency_penalty=0.25)
    for token in [7, 7, 7, 11]:
        it.counts.add(token)  # type: ignore[union-attr]
    mine = logits.clone()
    processors.apply_penalties(mine, [it])
    expected = logits.clone()  # OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence
    expected[0, 7] -= 3 * 0.25 + 0.5
    expected[0, 11] -= 0.25 + 0.5
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


def test_token_counts_grow() -> None:
    counts = processors.TokenCounts([1, 2, 2])
    rng = random.Random(0)
    tokens = [rng.randrange(500) for _ in range(1000)]
    for token in tokens:
        counts.add(token)
    expected = {t: tokens.count(t) for t in {*tokens, 1, 2}}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_logit_bias_is_transformers() -> None:
    logits = random_logits(2, 3)
    bias = {4: -7.5, 900: 12.0}
    mine = logits.clone()
    processors.apply_logit_bias(mine, [state(), state(logit_bias=bias)])
    theirs = SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})(NO_IDS, logits.clone())
    assert torch.equal(mine[0], logits[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=0)


def test_min_tokens_is_transformers_min_length() -> None:
    logits = random_logits(2, 4)
    theirs = MinLengthLogitsProcessor(5, eos_token_id=[3, 17], device="cpu")(
        NO_IDS, logits[:1].clone()
    )
    mine = logits.clone()
    states = [state(min_tokens=5, stop_token_ids=frozenset({17}), max_tokens=9) for _ in range(2)]
    processors.ban_early_stops(mine, states, [4, 5])
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], logits[1])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_temperature_is_transformers(temperature: float) -> None:
    logits = random_logits(2, 5)
    mine = logits.clone()
    processors.apply_temperature(mine, torch.full((2,), temperature))
    theirs = TemperatureLogitsWarper(temperature)(NO_IDS, logits.clone())
    torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
def test_min_p_is_transformers(min_p: float) -> None:
    logits = random_logits(4, 6)
    theirs = MinPLogitsWarper(min_p)(NO_IDS, logits.clone())
    for mine, row in zip(logits.numpy(), theirs, strict=True):
        weights = torch.from_numpy(row_weights(mine, 1.0, min_p)[:V])
        assert torch.equal(weights > 0, row.softmax(-1) > 0)
        torch.testing.assert_close(weights / weights.sum(), row.softmax(-1), rtol=1e-5, atol=1e-9)


def test_a_row_alone_and_in_a_batch_draw_the_same() -> None:
    logits = random_logits(64, 17)
    rng = random.Random(1)
    temperatures = [rng.uniform(0.2, 2) for _ in range(64)]
    min_ps = [rng.choice([0.0, 0.1, 0.5]) for _ in range(64)]
    uniform = [rng.random() for _ in range(64)]
    alone = [
        draw_row(*args) for args in zip(logits.numpy(), temperatures, min_ps, uniform, strict=True)
    ]
    assert draw_batch(logits, temperatures, min_ps, uniform) == alone


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 5000])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_top_tokens_are_a_stable_sort(vocab_size: int, count: int) -> None:
    row = random_logits(1, vocab_size + count, vocab_size)[0].round(decimals=1)  # with equals
    expected = row.sort(descending=True, stable=True).indices[:count].tolist()
    assert top_tokens(row.numpy(), count) == expected


def test_top_k_top_p_min_p_draw_what_transformers_keeps(sampler: Sampler) -> None:
    row = random_logits(1, 7, 50)
    for params, warpers in [
        ({"top_k": 4}, [TopKLogitsWarper(4)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"top_k": 5, "top_p": 0.8}, [TopKLogitsWarper(5), TopPLogitsWarper(0.8)]),
        ({"top_k": 9, "min_p": 0.1}, [TopKLogitsWarper(9), MinPLogitsWarper(0.1)]),
    ]:
        theirs = row.clone()
        for warper in warpers:
            theirs = warper(NO_IDS, theirs)
        allowed = set(torch.nonzero(~theirs[0].isneginf())[:, 0].tolist())
        likely = set(torch.nonzero(theirs[0].softmax(-1) > 0.03)[:, 0].tolist())
        drawn = kept(sampler, row, **params)
        assert likely <= drawn <= allowed


def test_rows_of_different_kinds_do_not_meet(sampler: Sampler) -> None:
    logits = random_logits(7, 8)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_k": 10},
        {"temperature": 1.5, "seed": 3, "top_p": 0.5, "logprobs": 3},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 4, "min_p": 0.2, "frequency_penalty": 1.0},
        {"logit_bias": {44: 100.0}, "logprobs": 0},
    ]
    together = [state(**k) for k in kinds]
    alone = [state(**k) for k in kinds]
    for step in range(6):
        both = sampler.sample(logits, together, [step] * 7)
        single = [
            sampler.sample(logits[i : i + 1].clone(), [s], [step]) for i, s in enumerate(alone)
        ]
        assert both.token_ids == [s.token_ids[0] for s in single]
        assert both.logprobs == {i: s.logprobs[0] for i, s in enumerate(single) if s.logprobs}
        logits = random_logits(7, 100 + step)


def test_seeded_draws_repeat_and_differ_between_steps_and_seeds(sampler: Sampler) -> None:
    logits = random_logits(1, 9) * 0.1

    def ten(seed: int | None) -> list[int]:
        it = state(temperature=1.0, seed=seed)
        return [draws(sampler, logits, [it])[0] for _ in range(10)]

    assert ten(5) == ten(5)
    assert len(set(ten(5))) > 5
    assert ten(5) != ten(6)
    assert ten(None) != ten(None)
    assert ten(-1) == ten(2**64 - 1)


@pytest.mark.parametrize("vocab_size", [7, 256, 257, 1000])
def test_draws_follow_the_distribution(sampler: Sampler, vocab_size: int) -> None:
    row = random_logits(1, vocab_size, vocab_size) * 0.5
    probabilities = row[0].double().softmax(-1).numpy()
    n = 8_000
    it = state(temperature=1.0, seed=11)
    counts = np.zeros(vocab_size)
    for _ in range(n // 500):
        batch = [it] * 500
        for token in draws(sampler, row.expand(500, -1).contiguous(), batch):
            counts[token] += 1
    big = probabilities * n > 5
    chi2 = float(((counts - probabilities * n) ** 2 / (probabilities * n))[big].sum())
    freedom = int(big.sum())
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom) + 10


def test_only_tokens_with_weight_are_drawn(sampler: Sampler) -> None:
    logits = torch.full((300, V), float("-inf"))
    logits[:, [0, 255, 256, 999]] = torch.tensor([1.0, 2.0, 0.5, 1.5])
    drawn = draws(sampler, logits, [state(temperature=1.0, seed=i) for i in range(300)])
    assert set(drawn) == {0, 255, 256, 999}


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 1e5])
def test_extreme_temperatures_are_finite(sampler: Sampler, temperature: float) -> None:
    logits = random_logits(20, 10) * 1e4
    drawn = draws(sampler, logits, [state(temperature=temperature) for _ in range(20)])
    if temperature < 1:
        assert drawn == logits.argmax(-1).tolist()


def test_logprobs_are_the_raw_distribution(sampler: Sampler) -> None:
    logits = random_logits(2, 12)
    bias = {31: 50.0}
    states = [state(logprobs=5, temperature=0.2, seed=1, logit_bias=bias), state(logprobs=0)]
    result = sampler.sample(logits, states, [0, 0])
    expected = logits.double().log_softmax(-1)
    assert result.token_ids[0] == 31
    for i in range(2):
        assert result.logprobs[i].logprob == pytest.approx(
            float(expected[i, result.token_ids[i]]), abs=1e-4
        )
    top = expected[0].topk(5)
    assert [t.token_id for t in result.logprobs[0].top] == top.indices.tolist()
    assert [t.logprob for t in result.logprobs[0].top] == pytest.approx(
        top.values.tolist(), abs=1e-4
    )
    assert result.logprobs[1].top == ()


def test_compute_logprobs_cuts_each_row_to_its_own_count() -> None:
    logits = random_logits(3, 13)
    values = compute_logprobs(logits, range(3), [1, 2, 3], [0, 2, 5])
    assert [len(v.top) for v in values] == [0, 2, 5]


@pytest.mark.parametrize(
    ("bad", "found"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "only -inf")],
)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(
    sampler: Sampler, bad: float, found: str, params: dict[str, Any]
) -> None:
    logits = random_logits(3, 14)
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 77] = bad
    result = sampler.sample(logits, [state(**params) for _ in range(3)], [0, 0, 0])
    assert list(result.errors) == [1]
    assert found in result.errors[1].message
    assert result.errors[1].fault == "server"
    if not params.get("temperature"):
        assert result.token_ids[0] == int(logits[0].argmax())


class OneBitGrammar:
    """Allows one token, or fails."""

    def __init__(self, token: int | None) -> None:
        self.token = token

    def bitmask(self) -> np.ndarray:
        if self.token is None:
            raise GrammarError("too complex")
        bits = np.zeros(V - 100, dtype=np.uint8)  # a tokenizer smaller than the model's vocabulary
        bits[self.token] = 1
        return np.packbits(bits, bitorder="little")


def test_grammar_masks_and_its_errors(sampler: Sampler) -> None:
    logits = random_logits(4, 15)
    logits[:, V - 1] = 1e3  # beyond the tokenizer
    states = [
        state(grammar=OneBitGrammar(123)),
        state(grammar=OneBitGrammar(None)),
        state(grammar=OneBitGrammar(3), min_tokens=2),
        state(),
    ]
    result = sampler.sample(logits, states, [0, 0, 0, 0])
    assert result.token_ids[0] == 123
    assert result.token_ids[3] == V - 1
    assert result.errors[1] == Failure("request", "structured output: too complex")
    assert result.errors[2].fault == "request"
    assert "no token is left" in result.errors[2].message


def test_logits_are_left_as_they_were(sampler: Sampler) -> None:
    logits = random_logits(2, 16)
    before = logits.clone()
    states = [state(temperature=0.5, top_k=3, logit_bias={1: 1.0}, repetition_penalty=2.0)] * 2
    sampler.sample(logits, states, [0, 0])
    assert torch.equal(logits, before)
