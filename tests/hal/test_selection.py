"""The rule of selection, its trace, and that it cannot be led astray."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hal.candidates import KernelCandidate, SemanticNote
from hal.device import EAGER, DevicePolicy
from hal.errors import SelectionError, UnservedRequestError
from hal.ops import TokenRange
from hal.ops.attention import AttentionRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.reasons import Reason, ReasonKind
from hal.selection import FLOOR_TIER, Decision, SelectionRules, select
from hal.tiers import Tier

NO_RULES = SelectionRules(explicit={})
OF_CANDIDATES = [
    ReasonKind.SCOPE,
    ReasonKind.HARDWARE,
    ReasonKind.ARGUMENT,
    ReasonKind.SOFTWARE,
    ReasonKind.MISSING,
    ReasonKind.UNVERIFIED,
]


def rules(**fields: Any) -> SelectionRules:
    return SelectionRules(**({"explicit": {}} | fields))


def trace(decision: Decision) -> dict[str, list[Reason]]:
    return {loser.name: list(loser.reasons) for loser in decision.rejected}


# --- the rule -------------------------------------------------------------------------------------


def test_a_higher_tier_wins_whatever_the_estimates_say(candidate: Any, gemm: Any) -> None:
    offered = [candidate("a", Tier.TUNED, us=1.0), candidate("b", Tier.NATIVE, us=9.0)]
    decision = select(gemm(), offered, NO_RULES)
    assert (decision.choice.name, decision.estimate_us, decision.lost) == ("b", 9.0, None)
    (reason,) = trace(decision)["a"]
    assert (reason.what, reason.required, reason.found) == ("tier", "native", "tuned")


def test_within_a_tier_the_faster_wins_and_the_unmeasured_is_last(
    candidate: Any, gemm: Any
) -> None:
    offered = [candidate("a"), candidate("b", us=7.25), candidate("c", us=7.5)]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.choice.name == "b"
    assert [loser.name for loser in decision.rejected] == ["c", "a"]
    assert "below 7.25 µs (b)" in str(trace(decision)["c"][0])
    assert trace(decision)["c"][0].found == "7.5 µs"
    assert trace(decision)["a"][0].found == "not measured"


def test_estimates_are_asked_for_the_upper_end_of_the_range(candidate: Any, gemm: Any) -> None:
    asked: list[int] = []

    def time(tokens: int) -> float:
        asked.append(tokens)
        return float(tokens)

    decision = select(gemm(tokens=TokenRange(5, 48)), [candidate("a", us=time)], NO_RULES)
    assert (asked, decision.estimate_us) == ([48], 48.0)


@pytest.mark.parametrize("us", [None, 3.0])
def test_ties_go_to_the_smaller_distribution_then_name(
    candidate: Any, gemm: Any, us: float | None
) -> None:
    offered = [
        candidate("a.x", us=us, distribution="zeta"),
        candidate("z.y", us=us, distribution="alpha"),
        candidate("z.x", us=us, distribution="alpha"),
    ]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.choice.name == "z.x"
    assert [loser.name for loser in decision.rejected] == ["z.y", "a.x"]
    reason = trace(decision)["a.x"][0]
    # The stated order must be one in which the choice does come first.
    assert (reason.required, reason.found) == ("z.x of alpha", "a.x of zeta")
    assert reason.what.startswith("order of distribution and name")


def test_times_that_differ_little_are_shown_as_different(candidate: Any, gemm: Any) -> None:
    decision = select(gemm(), [candidate("a", us=5.02), candidate("b", us=5.04)], NO_RULES)
    reason = trace(decision)["b"][0]
    assert (reason.required, reason.found) == ("below 5.02 µs (a)", "5.04 µs")


@st.composite
def offers(draw: st.DrawFn) -> list[dict[str, Any]]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True))
    return [
        {
            "name": name,
            "tier": draw(st.sampled_from(Tier)),
            "us": draw(st.sampled_from([None, 1.0, 1.5, 8.0])),
            "unmet": draw(
                st.lists(st.sampled_from(OF_CANDIDATES), max_size=2).map(tuple)
                if draw(st.booleans())
                else st.just(())
            ),
            "notes": draw(st.sampled_from([(), (), ("bf16",), ("int8", "bf16")])),
            "distribution": draw(st.sampled_from(["halstack", "acme"])),
            "is_graph_safe": draw(st.booleans()),
        }
        for name in names
    ]


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    offers=offers(),
    seed=st.integers(),
    graph=st.sampled_from(["eager", "graph"]),
    semantics=st.sampled_from([frozenset(), frozenset({"bf16"}), frozenset({"*"})]),
    disabled=st.sampled_from([{}, {"a": "slow"}, {"[a-d]": "wrong results"}]),
    held=st.sampled_from([None, "a", "b"]),
    wanted=st.sampled_from([None, None, None, "a", "b"]),
)
@example(
    offers=[{"name": "a", "tier": Tier.TUNED}],
    seed=0,
    graph="eager",
    semantics=frozenset(),
    disabled={},
    held="a",
    wanted="a",
)
def test_any_order_of_candidates_gives_the_same_decision_or_error(
    candidate: Any,
    gemm: Any,
    offers: list[dict[str, Any]],
    seed: int,
    graph: str,
    semantics: frozenset[str],
    disabled: dict[str, str],
    held: str | None,
    wanted: str | None,
) -> None:
    request = gemm(graph_mode=graph)
    offered = [candidate(**offer) for offer in offers]
    shuffled = random.Random(seed).sample(offered, len(offered))
    given_rules = SelectionRules(
        explicit={"gemm": wanted} if wanted else {},
        allowed_semantics=semantics,
        policy=DevicePolicy(disabled=disabled),
    )
    outcomes: list[Any] = []
    for order in (offered, shuffled, offered[::-1]):
        try:
            outcomes.append(select(request, order, given_rules, held=held))
        except SelectionError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    if isinstance(outcomes[0], Decision):
        check_trace(outcomes[0], offered, given_rules, held)


def check_trace(
    decision: Decision,
    offered: list[KernelCandidate],
    given_rules: SelectionRules,
    held: str | None,
) -> None:
    """What holds for every decision."""
    choice, request = decision.choice, decision.request
    losers = {loser.name for loser in decision.rejected}
    assert losers | {choice.name} == {c.name for c in offered}
    assert choice.name not in losers
    assert choice.serves(request)
    assert request.graph_mode == "eager" or choice.is_graph_safe
    assert choice.name not in given_rules.policy.disabled
    assert all(given_rules.allows(note) for note in decision.semantic_notes)
    wanted = given_rules.explicit_choice(request)
    assert decision.is_explicit == (wanted is not None)
    assert wanted in (None, choice.name)
    for loser in decision.rejected:
        assert loser.reasons
        assert all(r.what and r.required and r.found for r in loser.reasons)
        is_able = all(r.kind in (ReasonKind.RANKED, ReasonKind.EXPLICIT) for r in loser.reasons)
        if is_able and wanted is None:
            assert loser.tier <= choice.tier
            theirs, mine = loser.estimate_us, decision.estimate_us
            if loser.tier == choice.tier and theirs is not None and (mine is None or theirs < mine):
                assert choice.name == held
        if not is_able:
            assert loser.estimate_us is None
    lost = decision.lost
    if wanted is not None or lost is None:
        assert wanted is not None or choice.tier >= FLOOR_TIER
    elif lost.better:
        reasons = trace(decision)[lost.better]
        assert lost.better_tier > choice.tier
        assert all(r.kind.is_attainable for r in reasons)
    else:
        assert choice.tier < FLOOR_TIER


# --- explicit choices -----------------------------------------------------------------------------


def test_an_explicit_choice_is_taken_though_worse_and_is_no_lost_path(
    candidate: Any, gemm: Any
) -> None:
    offered = [candidate("slow", Tier.REFERENCE), candidate("fast", Tier.NATIVE, us=1.0)]
    decision = select(gemm(), offered, rules(explicit={"gemm": "slow"}))
    assert (decision.choice.name, decision.is_explicit, decision.lost) == ("slow", True, None)
    (reason,) = trace(decision)["fast"]
    assert (reason.kind, reason.required, reason.found) == (ReasonKind.EXPLICIT, "fast", "slow")


@pytest.mark.parametrize(
    "why",
    [
        {"unmet": [ReasonKind.ARGUMENT]},
        {"unmet": [ReasonKind.HARDWARE, ReasonKind.SCOPE]},
        {"notes": ["bf16"]},
        {"is_graph_safe": False},
        {"name": "disabled.x"},
    ],
    ids=str,
)
def test_an_explicit_choice_that_cannot_serve_raises_and_never_degrades(
    candidate: Any, gemm: Any, why: dict[str, Any]
) -> None:
    wanted = candidate(**({"name": "wanted"} | why))
    offered = [wanted, candidate("other", Tier.NATIVE)]
    given_rules = rules(
        explicit={"gemm": wanted.name}, policy=DevicePolicy(disabled={"disabled.*": "wrong sums"})
    )
    with pytest.raises(SelectionError, match="never degraded") as raised:
        select(gemm(graph_mode="graph"), offered, given_rules, held="other")
    assert f"--use gemm={wanted.name}" in raised.value.who
    assert raised.value.found


def test_a_misspelt_explicit_choice_suggests_the_nearest(candidate: Any, gemm: Any) -> None:
    offered = [candidate("cpu.gemm.jit"), candidate("cpu.gemm.linear")]
    with pytest.raises(SelectionError, match=r"did you mean 'cpu\.gemm\.jit'"):
        select(gemm(), offered, rules(explicit={"gemm": "cpu.gemm.jti"}))


def test_the_more_specific_explicit_choice_wins_and_the_error_quotes_the_one_given(
    candidate: Any,
) -> None:
    request = AttentionRequest(
        phase="decode",
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=8,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
    )
    offered = [candidate("a", op="attention"), candidate("b", op="attention")]
    both = rules(explicit={"attention": "a", "attention.decode": "b"})
    assert select(request, offered, both).choice.name == "b"
    assert select(request, offered, rules(explicit={"attention": "b"})).choice.name == "b"
    with pytest.raises(SelectionError) as raised:
        select(request, offered, rules(explicit={"attention": "c"}))
    assert "--use attention=c for attention.decode" in raised.value.who


# --- policy, graph mode, semantics ----------------------------------------------------------------


def test_what_the_policy_disables_is_not_taken_and_the_trace_says_why(
    candidate: Any, gemm: Any
) -> None:
    offered = [candidate("vendor.fast", Tier.NATIVE), candidate("vendor.ok", Tier.TUNED)]
    policy = DevicePolicy(disabled={"vendor.f*": "wrong results with driver 5"})
    decision = select(gemm(), offered, rules(policy=policy))
    assert decision.choice.name == "vendor.ok"
    (reason,) = trace(decision)["vendor.fast"]
    assert reason.kind is ReasonKind.POLICY
    assert reason.found == "disabled: wrong results with driver 5"
    assert decision.lost is None
    # Nor is it lost if an argument is in the way too: once that is fixed it stays disabled.
    offered[0] = candidate("vendor.fast", Tier.NATIVE, unmet=[ReasonKind.ARGUMENT])
    assert select(gemm(), offered, rules(policy=policy)).lost is None


def test_a_candidate_that_is_not_safe_to_capture_is_a_lost_path_in_graph_mode(
    candidate: Any, gemm: Any
) -> None:
    offered = [candidate("a", Tier.NATIVE, is_graph_safe=False), candidate("b", Tier.TUNED)]
    assert select(gemm(), offered, NO_RULES).choice.name == "a"
    decision = select(gemm(graph_mode="graph"), offered, NO_RULES)
    assert decision.choice.name == "b"
    assert decision.lost is not None
    assert (decision.lost.better, decision.lost.better_tier) == ("a", Tier.NATIVE)


def test_a_platform_that_forces_eager_captures_nothing(candidate: Any, gemm: Any) -> None:
    offered = [candidate("a", Tier.NATIVE), candidate("b", Tier.TUNED)]
    policy = DevicePolicy(forced_features={EAGER: "its graphs lose a kernel"})
    assert select(gemm(), offered, rules(policy=policy)).choice.name == "a"
    with pytest.raises(UnservedRequestError, match="its graphs lose a kernel"):
        select(gemm(graph_mode="graph"), offered, rules(policy=policy))


def test_semantic_changes_are_refused_unless_each_is_allowed(candidate: Any, gemm: Any) -> None:
    offered = [
        candidate("odd", Tier.NATIVE, notes=["bf16_math", "dense"]),
        candidate("exact", Tier.TUNED),
    ]
    for allowed in (frozenset(), frozenset({"bf16_*"}), frozenset({"dense"})):
        decision = select(gemm(), offered, rules(allowed_semantics=allowed))
        assert (decision.choice.name, decision.semantic_notes) == ("exact", ())
        refused = [r for r in trace(decision)["odd"] if r.kind is ReasonKind.SEMANTIC]
        assert len(refused) == 2 - len(allowed)
        assert decision.lost is None
    decision = select(gemm(), offered, rules(allowed_semantics=frozenset({"bf16_*", "dense"})))
    assert decision.choice.name == "odd"
    assert [note.name for note in decision.semantic_notes] == ["bf16_math", "dense"]


# --- lost fast paths ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ReasonKind.ARGUMENT, ReasonKind.SOFTWARE])
def test_a_better_tier_behind_a_fixable_reason_is_lost(
    candidate: Any, gemm: Any, kind: ReasonKind
) -> None:
    offered = [candidate("best", Tier.NATIVE, unmet=[kind]), candidate("ok", Tier.TUNED)]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.lost is not None
    text = decision.lost.describe(decision.choice)
    assert "ok is tuned" in text
    assert f"best is native ({kind} limit: required more, found less)" in text


@pytest.mark.parametrize("kind", [ReasonKind.SCOPE, ReasonKind.HARDWARE])
@pytest.mark.parametrize("beside", [(), (ReasonKind.ARGUMENT,), (ReasonKind.SOFTWARE,)], ids=str)
def test_a_better_tier_that_a_fix_would_not_bring_is_not_lost(
    candidate: Any, gemm: Any, kind: ReasonKind, beside: tuple[ReasonKind, ...]
) -> None:
    offered = [candidate("best", Tier.NATIVE, unmet=[*beside, kind]), candidate("ok", Tier.TUNED)]
    assert select(gemm(), offered, NO_RULES).lost is None


def test_a_better_tier_that_would_change_the_meaning_once_fixed_is_not_lost(
    candidate: Any, gemm: Any
) -> None:
    offered = [
        candidate("best", Tier.NATIVE, unmet=[ReasonKind.SOFTWARE], notes=["bf16"]),
        candidate("ok", Tier.TUNED),
    ]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.lost is None
    assert {r.kind for r in trace(decision)["best"]} == {ReasonKind.SOFTWARE, ReasonKind.SEMANTIC}
    allowed = select(gemm(), offered, rules(allowed_semantics=frozenset({"bf16"})))
    assert allowed.lost is not None


def test_notes_are_not_asked_of_a_candidate_that_is_for_something_else(
    candidate: Any, gemm: Any
) -> None:
    def surprised(request: GemmRequest) -> list[SemanticNote]:
        raise AssertionError("it cannot say for such a request")

    offered = [
        candidate("other", Tier.NATIVE, unmet=[ReasonKind.SCOPE], semantic_notes=surprised),
        candidate("ok"),
    ]
    assert select(gemm(), offered, NO_RULES).choice.name == "ok"


def test_the_same_tier_behind_a_fixable_reason_is_not_lost(candidate: Any, gemm: Any) -> None:
    offered = [candidate("a", unmet=[ReasonKind.SOFTWARE]), candidate("b")]
    assert select(gemm(), offered, NO_RULES).lost is None


def test_what_is_nearest_to_serving_is_what_was_lost(candidate: Any, gemm: Any) -> None:
    argument, missing = ReasonKind.ARGUMENT, ReasonKind.MISSING
    offered = [
        candidate("a.library", Tier.NATIVE, unmet=[argument, ReasonKind.SOFTWARE]),
        candidate("b.ours", Tier.NATIVE, unmet=[missing]),
        candidate("c.lower", Tier.TUNED, unmet=[missing]),
        candidate("d.runs", Tier.PORTABLE),
    ]
    lost = select(gemm(), offered, NO_RULES).lost
    assert lost is not None
    assert lost.better == "b.ours"  # not the first by name, whose kernel has no form for it
    # Among equals the rank decides, and a gap is still a loss where there is nothing nearer.
    lost = select(gemm(), [offered[0], offered[3]], NO_RULES).lost
    assert lost is not None
    assert lost.better == "a.library"


def test_a_candidate_for_something_else_is_named_where_there_is_no_other(
    candidate: Any, gemm: Any
) -> None:
    offered = [
        candidate("panels", Tier.NATIVE, unmet=[ReasonKind.SCOPE]),
        candidate("plain", Tier.REFERENCE),
    ]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.lost is not None
    assert "panels (scope limit: required more" in decision.lost.describe(decision.choice)


@pytest.mark.parametrize("tier", [t for t in Tier if t < FLOOR_TIER])
def test_a_choice_below_the_floor_is_lost_and_says_what_is_out_of_reach(
    candidate: Any, gemm: Any, tier: Tier
) -> None:
    offered = [
        candidate("amx", Tier.NATIVE, unmet=[ReasonKind.HARDWARE]),
        candidate("for_int8", Tier.NATIVE, unmet=[ReasonKind.SCOPE]),
        candidate("slow", tier),
    ]
    decision = select(gemm(), offered, NO_RULES)
    assert decision.lost is not None
    assert (decision.lost.better, decision.lost.better_tier) == ("", FLOOR_TIER)
    text = decision.lost.describe(decision.choice)
    assert "amx (hardware limit: required more, found less)" in text
    assert "for_int8" not in text
    alone = select(gemm(), offered[2:], NO_RULES)
    assert alone.lost is not None
    assert "none offered" in alone.lost.describe(alone.choice)


# --- held -----------------------------------------------------------------------------------------


def test_the_held_candidate_is_kept_and_the_trace_says_so(candidate: Any, gemm: Any) -> None:
    offered = [candidate("fast", us=1.0), candidate("held", us=1.02), candidate("slow", us=3.0)]
    decision = select(gemm(), offered, NO_RULES, held="held")
    assert (decision.choice.name, decision.estimate_us) == ("held", 1.02)
    assert "gain of a switch" in trace(decision)["fast"][0].what
    assert trace(decision)["fast"][0].found == "1 µs"
    assert trace(decision)["slow"][0].what == "estimated time"


@pytest.mark.parametrize("us", [None, 2.0])
def test_a_tie_against_the_held_is_not_explained_by_the_order_of_names(
    candidate: Any, gemm: Any, us: float | None
) -> None:
    decision = select(gemm(), [candidate("a", us=us), candidate("b", us=us)], NO_RULES, held="b")
    assert decision.choice.name == "b"
    assert "gain of a switch" in trace(decision)["a"][0].what


@pytest.mark.parametrize(
    "held",
    [{"tier": Tier.PORTABLE}, {"unmet": [ReasonKind.ARGUMENT]}, {"notes": ["bf16"]}],
    ids=str,
)
def test_a_held_candidate_never_costs_a_tier(
    candidate: Any, gemm: Any, held: dict[str, Any]
) -> None:
    offered = [candidate("best", us=9.0), candidate("held", us=1.0, **held)]
    assert select(gemm(), offered, NO_RULES, held="held").choice.name == "best"
    assert select(gemm(), offered, NO_RULES, held="nobody").choice.name == "best"


# --- nothing to choose from, and candidates that misbehave ----------------------------------------


def test_no_candidates_is_an_error_that_names_the_request(gemm: Any) -> None:
    with pytest.raises(SelectionError, match="no candidates at all") as raised:
        select(gemm(), [], NO_RULES)
    assert "gemm for 1-64 tokens" in raised.value.who


def test_no_able_candidate_is_an_error_with_all_reasons(candidate: Any, gemm: Any) -> None:
    offered = [
        candidate("a", Tier.NATIVE, unmet=[ReasonKind.HARDWARE]),
        candidate("b", notes=["bf16"]),
    ]
    with pytest.raises(SelectionError) as raised:
        select(gemm(weight_format=FORMATS["int4_g32"]), offered, NO_RULES)
    assert "a (native): hardware limit: required more, found less" in raised.value.found
    assert "b (tuned): semantics (bf16)" in raised.value.found
    assert 'waiver of kind "semantic"' in raised.value.remedy
    assert "int4_g32" in raised.value.who


def test_two_candidates_of_one_name_are_an_error_that_names_both_distributions(
    candidate: Any, gemm: Any
) -> None:
    offered = [candidate("a", distribution="one"), candidate("a", distribution="two", us=1.0)]
    with pytest.raises(SelectionError, match="a of one and of two"):
        select(gemm(), offered, NO_RULES)


def failing(*_: Any) -> Any:
    raise ZeroDivisionError("block size 0")


@pytest.mark.parametrize(
    ("question", "answer", "found"),
    [
        ("not_supported_reasons", failing, "ZeroDivisionError: block size 0"),
        ("not_supported_reasons", lambda request: None, "TypeError"),
        ("not_supported_reasons", lambda request: ["no"], "required Reason, found str"),
        *(
            (
                "not_supported_reasons",
                lambda request, k=kind: [Reason(what="a", required="b", found="c", kind=k)],
                f"found {kind}",
            )
            for kind in ReasonKind
            if kind not in OF_CANDIDATES
        ),
        ("estimate_us", failing, "ZeroDivisionError: block size 0"),
        ("estimate_us", lambda request, tokens: float("nan"), "found nan"),
        ("estimate_us", lambda request, tokens: float("inf"), "found inf"),
        ("estimate_us", lambda request, tokens: -1.0, "found -1.0"),
        ("estimate_us", lambda request, tokens: "fast", "TypeError"),
        ("semantic_notes", failing, "ZeroDivisionError: block size 0"),
    ],
)
def test_a_candidate_that_cannot_answer_is_named_with_its_distribution(
    candidate: Any, gemm: Any, question: str, answer: Any, found: str
) -> None:
    broken = candidate("acme.gemm", distribution="acme-halstack", **{question: answer})
    for offered in ([broken, candidate("ok", Tier.NATIVE)], [candidate("ok"), broken]):
        with pytest.raises(SelectionError) as raised:
            select(gemm(), offered, NO_RULES)
        assert raised.value.who == "acme.gemm of acme-halstack"
        assert question in raised.value.required
        assert found in raised.value.found


def test_a_time_of_zero_is_a_time(candidate: Any, gemm: Any) -> None:
    decision = select(gemm(), [candidate("b", us=0), candidate("a")], NO_RULES)
    assert (decision.choice.name, decision.estimate_us) == ("b", 0.0)
