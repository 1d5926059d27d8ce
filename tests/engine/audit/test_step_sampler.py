"""Which steps a light audit watches: the first of each kind, then only what it can afford."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_engine.audit.step_sampler import WATCH_SHARE, StepSampler, kind_of
from hal_engine.batch import Batch, ScheduledSequence

PLAIN_NS, WATCHED_NS = 8_000_000, 50_000_000


def sequence(num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(1, list(range(num_tokens)), 0, [0], "last")


def test_a_kind_is_its_phases_and_magnitudes() -> None:
    one, two, three = ([sequence(1)] * count for count in (1, 2, 3))
    assert kind_of(Batch(decode=one)) != kind_of(Batch(decode=two))
    assert kind_of(Batch(decode=two)) == kind_of(Batch(decode=three))
    assert kind_of(Batch(decode=one)) != kind_of(Batch(decode=one, prefill=[sequence(5)]))
    assert kind_of(Batch(prefill=[sequence(5)])) == kind_of(Batch(prefill=[sequence(7)]))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=400),
    st.integers(1, 70),
)
def test_the_first_of_a_kind_is_watched_and_the_next_timed(
    kinds: list[tuple[int, int]], every: int
) -> None:
    sampler = StepSampler(every)
    looks: dict[tuple[int, int], list[str]] = {}
    for kind in kinds:
        look = sampler.choose(kind)
        looks.setdefault(kind, []).append(look)
        sampler.took(kind, look, WATCHED_NS if look == "watching" else PLAIN_NS)
    for seen in looks.values():
        assert seen[:2] == ["watching", "timing"][: len(seen)]
    every_look = [look for seen in looks.values() for look in seen]
    assert sampler.num_watched == every_look.count("watching")
    assert sampler.num_timed == every_look.count("timing")


@pytest.mark.parametrize("every", [2, 64])
def test_watching_stays_within_its_share(every: int) -> None:
    sampler = StepSampler(every)
    watched = 0
    for _ in range(20_000):
        look = sampler.choose((1, 0))
        watched += look == "watching"
        sampler.took((1, 0), look, WATCHED_NS if look == "watching" else PLAIN_NS)
    spent = (watched - 1) * WATCHED_NS  # the first is not of the share
    assert 0 < spent <= WATCH_SHARE * 20_000 * PLAIN_NS
    assert spent > 0.8 * WATCH_SHARE * 20_000 * PLAIN_NS, "what it can afford is used"


def test_cheap_steps_are_watched_no_oftener_than_asked() -> None:
    sampler = StepSampler(100)
    for _ in range(10_000):
        look = sampler.choose((1, 0))
        sampler.took((1, 0), look, 1000 if look == "watching" else 1_000_000)
    assert sampler.num_watched == 100
