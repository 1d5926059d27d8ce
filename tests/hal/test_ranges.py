"""Token ranges: what they cover, when a switch is worth it, and what the merged trace says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.candidates import KernelCandidate, SemanticNote
from hal.ops import OpRequest, TokenRange
from hal.ranges import decide_ranges, token_buckets
from hal.reasons import Reason, ReasonKind
from hal.selection import Decision, SelectionRules, select
from hal.tiers import Tier

Decided = list[tuple[TokenRange, Decision]]


def decide(
    request: OpRequest,
    offered: Sequence[KernelCandidate],
    *,
    is_weighted: bool = False,
    use: str = "",
) -> Decided:
    rules = SelectionRules(explicit={request.op: use} if use else {})

    def choose(part: OpRequest, held: str | None) -> Decision:
        return select(part, offered, rules, held=held)

    return decide_ranges(request, choose, is_weighted=is_weighted)


def choices(decided: Decided) -> list[tuple[str, str]]:
    return [(str(tokens), decision.choice.name) for tokens, decision in decided]


def limited(low: int, high: int) -> Callable[[OpRequest], list[Reason]]:
    """Serves only low..high tokens."""

    def reasons(request: OpRequest) -> list[Reason]:
        if low <= request.tokens.low and request.tokens.high <= high:
            return []
        return [Reason(what="tokens", required=f"{low}-{high}", found=str(request.tokens))]

    return reasons


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_buckets_cover_the_range_exactly_and_end_at_powers_of_two(low: int, extra: int) -> None:
    buckets = token_buckets(TokenRange(low, low + extra))
    assert (buckets[0].low, buckets[-1].high) == (low, low + extra)
    for below, above in itertools.pairwise(buckets):
        assert above.low == below.high + 1
        assert below.high.bit_count() == 1
    assert all(b.high < 2 * b.low for b in buckets)


def test_buckets_of_a_plain_range() -> None:
    assert [str(b) for b in token_buckets(TokenRange(1, 20))] == [
        "1",
        "2",
        "3-4",
        "5-8",
        "9-16",
        "17-20",
    ]
    assert [str(b) for b in token_buckets(TokenRange(7, 7))] == ["7"]


def test_one_winner_is_one_range_whose_request_says_so(candidate: Any, gemm: Any) -> None:
    request = gemm(tokens=TokenRange(1, 100))
    offered = [candidate("a", us=lambda t: t * 1.0), candidate("b", us=lambda t: t * 3.0)]
    ((tokens, decision),) = decide(request, offered)
    assert str(tokens) == "1-100"
    assert decision.request == request
    assert decision.estimate_us == 100.0


def test_a_range_where_another_wins_clearly(candidate: Any, gemm: Any) -> None:
    offered = [
        candidate("small", us=lambda t: 10.0 if t <= 8 else 1000.0),
        candidate("large", us=lambda t: 50.0),
    ]
    for is_weighted in (False, True):
        decided = decide(gemm(), offered, is_weighted=is_weighted)
        assert choices(decided) == [("1-8", "small"), ("9-64", "large")]
        for tokens, decision in decided:
            assert decision.request.tokens == tokens
        assert decided[0][1].rejected[0].reasons[0].found == "50 µs"


@pytest.mark.parametrize(
    ("gain", "is_weighted", "is_split"),
    [
        (0.02, False, False),
        (0.04, False, True),
        (0.04, True, False),
        (0.09, True, False),
        (0.11, True, True),
    ],
)
def test_a_second_packing_needs_a_larger_gain_than_a_switch(
    candidate: Any, gemm: Any, gain: float, is_weighted: bool, is_split: bool
) -> None:
    offered = [
        candidate("most", us=lambda t: 100.0),
        candidate("few", us=lambda t: 100.0 * (1 - gain) if t <= 2 else 300.0),
    ]
    decided = decide(gemm(), offered, is_weighted=is_weighted)
    assert choices(decided) == (
        [("1-2", "few"), ("3-64", "most")] if is_split else [("1-64", "most")]
    )
    if not is_split:
        reasons = decided[0][1].rejected[0].reasons
        # The winner at small sizes lost for two causes, and neither is left out.
        assert [r.what.split(",")[0] for r in reasons] == [
            "estimated time",
            "gain of a switch between token ranges",
        ]
        assert "at up to 2 tokens" in reasons[1].what
        assert reasons[1].found == f"{100.0 * (1 - gain):.6g} µs"


def test_once_held_a_candidate_is_used_wherever_it_is_better(candidate: Any, gemm: Any) -> None:
    """The second packing is paid for by one size; at another size even 5% are taken."""
    offered = [
        candidate("most", us=lambda t: 100.0),
        candidate("few", us=lambda t: {1: 50.0, 2: 95.0}.get(t, 200.0)),
    ]
    decided = decide(gemm(), offered, is_weighted=True)
    assert choices(decided) == [("1-2", "few"), ("3-64", "most")]


def test_two_that_each_gain_a_little_over_the_same_do_not_both_come_in(
    candidate: Any, gemm: Any
) -> None:
    offered = [
        candidate("most", us=lambda t: 100.0 if t > 4 else 150.0),
        candidate("x", us=lambda t: 100.0 if t <= 2 else 104.0 if t <= 4 else 200.0),
        candidate("y", us=lambda t: 104.0 if t <= 2 else 100.0 if t <= 4 else 200.0),
    ]
    assert choices(decide(gemm(), offered, is_weighted=True)) == [("1-4", "x"), ("5-64", "most")]


def test_a_bucket_where_the_held_one_cannot_serve(candidate: Any, gemm: Any) -> None:
    offered = [
        candidate("most", us=lambda t: 100.0, not_supported_reasons=limited(1, 32)),
        candidate("rest", us=lambda t: 101.0),
    ]
    decided = decide(gemm(), offered, is_weighted=True)
    assert choices(decided) == [("1-32", "most"), ("33-64", "rest")]
    (loser,) = decided[1][1].rejected
    assert (loser.name, loser.reasons[0].required) == ("most", "1-32")


def test_a_bucket_where_only_a_lower_tier_can_serve_is_its_own_range_and_lost(
    candidate: Any, gemm: Any
) -> None:
    offered = [
        candidate("best", Tier.NATIVE, not_supported_reasons=limited(1, 16)),
        candidate("ok", Tier.TUNED, us=0.001),
    ]
    decided = decide(gemm(tokens=TokenRange(1, 256)), offered)
    # Each larger bucket found another number of tokens: still one range.
    assert choices(decided) == [("1-16", "best"), ("17-256", "ok")]
    assert [d.lost.better if d.lost else None for _, d in decided] == [None, "best"]


def test_ranges_of_one_choice_stay_apart_where_another_loser_could_not_serve(
    candidate: Any, gemm: Any
) -> None:
    offered = [
        candidate("best", Tier.NATIVE),
        candidate("some", not_supported_reasons=limited(1, 8)),
    ]
    decided = decide(gemm(), offered)
    assert choices(decided) == [("1-8", "best"), ("9-64", "best")]
    kinds = [d.rejected[0].reasons[0].kind for _, d in decided]
    assert kinds == [ReasonKind.RANKED, ReasonKind.ARGUMENT]


@pytest.mark.parametrize("field", ["required", "what", "kind"])
def test_causes_that_differ_are_not_merged_away(candidate: Any, gemm: Any, field: str) -> None:
    def reasons(request: OpRequest) -> list[Reason]:
        reason = {"what": "a", "required": "b", "found": "c", "kind": ReasonKind.HARDWARE}
        if request.tokens.low > 8:
            reason[field] = ReasonKind.SOFTWARE if field == "kind" else "other"
        return [Reason(**reason)]  # type: ignore[arg-type]  # built by name

    offered = [
        candidate("ok", Tier.TUNED),
        candidate("x", Tier.NATIVE, not_supported_reasons=reasons),
    ]
    assert [str(tokens) for tokens, _ in decide(gemm(), offered)] == ["1-8", "9-64"]


def test_a_loser_that_is_not_meant_for_a_size_divides_nothing(candidate: Any, gemm: Any) -> None:
    def up_to_8(request: OpRequest) -> list[Reason]:
        if request.tokens.high <= 8:
            return []
        found = str(request.tokens)
        return [Reason(what="message", required="<= 8", found=found, kind=ReasonKind.SCOPE)]

    offered = [
        candidate("best", Tier.NATIVE, us=lambda t: 1.0 * t),
        candidate("small", Tier.NATIVE, us=lambda t: 2.0 * t, not_supported_reasons=up_to_8),
    ]
    ((tokens, decision),) = decide(gemm(), offered)
    assert str(tokens) == "1-64"
    kinds = {reason.kind for reason in decision.rejected[0].reasons}
    assert kinds == {ReasonKind.SCOPE, ReasonKind.RANKED}


def test_where_another_one_is_lost_is_another_range(candidate: Any, gemm: Any) -> None:
    def up_to_8(request: OpRequest) -> list[Reason]:
        missing = Reason(what="library", required="x", found="no", kind=ReasonKind.SOFTWARE)
        found = str(request.tokens)
        size = Reason(what="size", required="<= 8", found=found, kind=ReasonKind.SCOPE)
        return [missing] if request.tokens.high <= 8 else [missing, size]

    offered = [
        candidate("ok", Tier.PORTABLE),
        candidate("small", Tier.NATIVE, not_supported_reasons=up_to_8),
        candidate("any", Tier.TUNED, unmet=(ReasonKind.SOFTWARE,)),
    ]
    found = {str(t): d.lost.better for t, d in decide(gemm(), offered) if d.lost is not None}
    assert found == {"1-8": "small", "9-64": "any"}


def test_a_meaning_that_depends_on_the_size_is_not_merged_away(candidate: Any, gemm: Any) -> None:
    def notes(request: OpRequest) -> list[SemanticNote]:
        return [SemanticNote(name="n", text="rounds")] if request.tokens.low > 8 else []

    rules = SelectionRules(explicit={}, allowed_semantics=frozenset({"n"}))
    offered = [candidate("a", semantic_notes=notes)]
    decided = decide_ranges(
        gemm(), lambda part, held: select(part, offered, rules, held=held), is_weighted=False
    )
    assert [(str(t), len(d.semantic_notes)) for t, d in decided] == [("1-8", 0), ("9-64", 1)]


def test_an_explicit_choice_has_one_range(candidate: Any, gemm: Any) -> None:
    offered = [candidate("a", us=lambda t: t * 1.0), candidate("b", us=lambda t: 64.0 / t)]
    decided = decide(gemm(), offered, use="a")
    assert choices(decided) == [("1-64", "a")]
    assert decided[0][1].is_explicit


def test_without_measurements_there_is_one_range(candidate: Any, gemm: Any) -> None:
    assert choices(decide(gemm(), [candidate("b"), candidate("a")])) == [("1-64", "a")]


def test_times_of_zero_do_not_divide(candidate: Any, gemm: Any) -> None:
    offered = [candidate("a", us=lambda t: 0.0 if t < 4 else 1.0), candidate("b", us=lambda t: 0.5)]
    assert {name for _, name in choices(decide(gemm(), offered))} <= {"a", "b"}


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    table=st.dictionaries(
        st.sampled_from("abcd"),
        st.lists(st.sampled_from([None, 0.0, 1.0, 1.05, 1.5, 9.0]), min_size=7, max_size=7),
        min_size=1,
    ),
    tiers=st.lists(st.sampled_from([Tier.TUNED, Tier.NATIVE]), min_size=4, max_size=4),
    first_unable=st.lists(st.sampled_from([1, 9, 65, 65]), min_size=4, max_size=4),
    is_weighted=st.booleans(),
    low=st.integers(1, 40),
)
def test_ranges_cover_never_cost_a_tier_and_do_not_depend_on_the_order(
    candidate: Any,
    gemm: Any,
    table: dict[str, list[float | None]],
    tiers: list[Tier],
    first_unable: list[int],
    is_weighted: bool,
    low: int,
) -> None:
    def by_bucket(times: list[float | None]) -> Callable[[int], float | None]:
        return lambda tokens: times[(tokens - 1).bit_length()]

    request = gemm(tokens=TokenRange(low, 64))
    offered = [candidate("zz", Tier.PORTABLE)] + [
        candidate(
            name,
            tiers["abcd".index(name)],
            us=by_bucket(times),
            not_supported_reasons=limited(1, first_unable["abcd".index(name)] - 1),
        )
        for name, times in table.items()
    ]
    decided = decide(request, offered, is_weighted=is_weighted)
    assert decide(request, offered[::-1], is_weighted=is_weighted) == decided
    assert (decided[0][0].low, decided[-1][0].high) == (low, 64)
    for (below, _), (above, _) in itertools.pairwise(decided):
        assert above.low == below.high + 1
    rules = SelectionRules(explicit={})
    for tokens, decision in decided:
        assert decision.request.tokens == tokens
        assert decision.choice.serves(request.with_tokens(tokens))
        for bucket in token_buckets(tokens):
            free = select(request.with_tokens(bucket), offered, rules)
            assert free.choice.tier == decision.choice.tier
