"""Steps that are to be captured: when selection passes over what is not safe to capture, and what a
plan says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.candidates import KernelCandidate
from hal.captured_steps import CaptureScope
from hal.device import DevicePolicy, DeviceSpec
from hal.ops import TokenRange
from hal.ops.norm import RmsNormRequest
from hal.plan import OpSite, Plan, plan_hash
from hal.planner import PlanInputs, create_plan
from hal.plugins.validation import checked_policy
from hal.reasons import ReasonKind
from hal.tiers import Tier
from hal.waivers import WaiverBook

LAYERS = tuple(range(10))
# Ten layers of one product and one norm, and a head: 21 calls a step.
MakePlan = Callable[..., Plan]


@pytest.fixture
def make_plan(gemm: Any, candidate: Any, device: DeviceSpec) -> MakePlan:
    norm = RmsNormRequest(hidden_size=8, dtype="float32", tokens=TokenRange(1, 64))
    sites = [
        OpSite(site="layers.*.proj", request=gemm(), layers=LAYERS),
        OpSite(site="layers.*.norm", request=norm, layers=LAYERS),
        OpSite(site="lm_head", request=gemm(n=640)),
    ]

    def make(gemms: list[KernelCandidate], saved_us: float, most: int = 16, **fields: Any) -> Plan:
        norms = [candidate("toy.norm", Tier.NATIVE, us=1.0, op="norm.rms")]
        offered = {"gemm": gemms, "norm.rms": norms}
        scope = CaptureScope(most_sequences=most, saved_us=saved_us, covers=lambda site: True)
        given = PlanInputs(
            sites=sites,
            device=device,
            policy=DevicePolicy(),
            candidates=lambda op, device: offered.get(op, ()),
            waivers=WaiverBook(),
            **{"captures": scope, **fields},
        )
        return create_plan(given, model={}, settings={}, kv_bytes_per_token=1)

    return make


def head_only(us: float) -> Callable[[Any, int], float]:
    """A time that only the head has; the layers' products take 9 µs."""
    return lambda request, tokens: us if request.n == 640 else 9.0


@pytest.fixture
def gemms(candidate: Any) -> list[KernelCandidate]:
    """The unsafe one is 100 µs faster in the head, and slower everywhere else."""
    safe = candidate("toy.safe", Tier.NATIVE, estimate_us=head_only(300.0))
    fast = candidate(
        "toy.fast",
        Tier.NATIVE,
        estimate_us=lambda request, tokens: 200.0 if request.n == 640 else 9.5,
        is_graph_safe=False,
    )
    return [safe, fast]


def choices(plan: Plan, site: str) -> list[tuple[str, str]]:
    return [(str(op.tokens), op.choice.name) for op in plan.ops if op.site.site == site]


def test_a_faster_call_is_left_where_it_makes_the_step_slower(
    make_plan: MakePlan, gemms: list[KernelCandidate]
) -> None:
    # 21 calls x 6 µs = 126 µs are saved by what costs 100.
    plan = make_plan(gemms, 6.0)
    assert choices(plan, "lm_head") == [("1-16", "toy.safe"), ("17-64", "toy.fast")]
    (loser,) = plan.ops[-2].decision.rejected
    assert loser.name == "toy.fast"
    (reason,) = loser.reasons
    assert reason.kind is ReasonKind.CAPTURE
    assert reason.what == "captured steps"
    assert (
        reason.required
        == "safe to capture: a step of 9-16 sequences as one call takes 26 µs less by the estimates"
    )
    assert reason.found == "not safe to capture"
    assert plan.ops[-2].decision.lost is None


def test_it_is_taken_where_the_step_gains_by_it(
    make_plan: MakePlan, gemms: list[KernelCandidate]
) -> None:
    assert choices(make_plan(gemms, 4.0), "lm_head") == [("1-64", "toy.fast")]


def test_without_captures_nothing_is_passed_over(
    make_plan: MakePlan, gemms: list[KernelCandidate]
) -> None:
    plan = make_plan(gemms, 6.0, captures=None)
    assert choices(plan, "lm_head") == [("1-64", "toy.fast")]


def test_a_named_choice_is_kept(make_plan: MakePlan, gemms: list[KernelCandidate]) -> None:
    plan = make_plan(gemms, 6.0, use={"gemm": "toy.fast"})
    assert choices(plan, "lm_head") == [("1-64", "toy.fast")]
    assert choices(plan, "layers.*.proj") == [("1-64", "toy.fast")]


def test_a_tier_is_never_given_for_a_capture(make_plan: MakePlan, candidate: Any) -> None:
    offered = [
        candidate("toy.safe", Tier.TUNED, us=1.0),
        candidate("toy.fast", Tier.NATIVE, us=1.0, is_graph_safe=False),
    ]
    plan = make_plan(offered, 1000.0)
    assert {choice for _, choice in choices(plan, "lm_head")} == {"toy.fast"}


def test_one_call_without_a_safe_implementation_leaves_the_others_free(
    make_plan: MakePlan, gemms: list[KernelCandidate], candidate: Any
) -> None:
    def not_in_layers(request: Any) -> tuple[Any, ...]:
        from hal.reasons import Reason

        if request.n == 640:
            return ()
        return (Reason(what="n", required="640", found="64", kind=ReasonKind.HARDWARE),)

    safe = candidate(
        "toy.safe",
        Tier.NATIVE,
        estimate_us=head_only(300.0),
        not_supported_reasons=not_in_layers,
    )
    plan = make_plan([safe, gemms[1]], 1000.0)
    assert choices(plan, "lm_head") == [("1-64", "toy.fast")]


def test_a_time_that_nobody_measured_decides_nothing(make_plan: MakePlan, candidate: Any) -> None:
    offered = [
        candidate("toy.safe", Tier.NATIVE),
        candidate("toy.fast", Tier.NATIVE, us=1.0, is_graph_safe=False),
    ]
    assert choices(make_plan(offered, 1000.0), "lm_head") == [("1-64", "toy.fast")]


def test_the_hash_does_not_hang_on_the_time_that_is_saved(
    make_plan: MakePlan, gemms: list[KernelCandidate]
) -> None:
    one, other = (make_plan(gemms, saved).to_dict() for saved in (6.0, 7.0))
    assert one["ops"] != other["ops"]
    assert plan_hash(one) == plan_hash(other)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    times=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=5, max_size=5),
    saved=st.integers(1, 30),
    most=st.integers(1, 16),
)
def test_no_step_is_slower_for_it(
    make_plan: MakePlan, candidate: Any, times: list[tuple[int, int]], saved: int, most: int
) -> None:
    """Against all bucket sizes added up by hand: the cheaper way for the head is the plan's."""

    def us(which: int) -> Callable[[Any, int], float]:
        def estimate(request: Any, tokens: int) -> float:
            bucket = min(max(tokens - 1, 0).bit_length(), 4)
            return float(times[bucket][which]) if request.n == 640 else 9.0

        return estimate

    offered = [
        candidate("toy.safe", Tier.NATIVE, estimate_us=us(0)),
        candidate("toy.unsafe", Tier.NATIVE, estimate_us=us(1), is_graph_safe=False),
    ]
    plan = make_plan(offered, float(saved), most)
    layers = {name for _, name in choices(plan, "layers.*.proj")}
    assert layers == {"toy.safe"}  # by name, at equal times
    for bucket in range(5):
        tokens = 2**bucket
        if tokens > most:
            continue
        (name,) = {
            op.choice.name
            for op in plan.ops
            if op.site.site == "lm_head" and op.tokens.low <= tokens <= op.tokens.high
        }
        safe, unsafe = times[bucket]
        if safe - unsafe < 21 * saved:
            assert name == "toy.safe"
        else:  # unless what is held for other sizes is nearly as good
            assert name == "toy.unsafe" or unsafe >= 0.9 * safe


@pytest.mark.parametrize("saved", [-1.0, float("nan"), float("inf"), 1e7])
def test_a_saving_that_is_no_time_is_refused(saved: float) -> None:
    with pytest.raises(ValueError, match="capture_saves_us"):
        checked_policy(DevicePolicy(capture_saves_us=saved))
