"""Plans as reports: violations as data, least times of steps, what a lost path costs, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from hal.candidates import KernelCandidate, Work
from hal.device import Confidence, DevicePolicy, DeviceSpec, Evidence
from hal.device_group import GroupLink, group_link_of
from hal.errors import PlanError, SelectionError, UnservedRequestError
from hal.ops import TokenRange
from hal.ops.collective import CollectiveRequest
from hal.ops.embedding import EmbeddingRequest
from hal.plan import OpSite, Plan
from hal.planner import PlanInputs, create_plan
from hal.reasons import Reason, ReasonKind
from hal.step_costs import SiteCost, Step, StepEstimate
from hal.tiers import Tier
from hal.unlocks import unlocks_of
from hal.violations import Violation, violation_error, violation_lines, waiver_stanzas
from hal.waivers import WaiverBook, waiver_text

BANDWIDTH = 2.0e9
RATES = {"float32": 1.0e12, "bfloat16": 4.0e12}


@pytest.fixture
def fast(device: DeviceSpec) -> DeviceSpec:
    return dataclasses.replace(device, memory_bandwidth=BANDWIDTH, peak_flops=RATES)


def report(
    sites: Sequence[OpSite],
    offered: Sequence[KernelCandidate],
    device: DeviceSpec,
    *,
    steps: Sequence[Step] = (Step(phase="decode", tokens=4),),
    link: GroupLink | None = None,
    world_size: int = 1,
    **fields: Any,
) -> Plan:
    inputs = PlanInputs(
        sites=sites,
        device=device,
        policy=DevicePolicy(),
        candidates=lambda op, _: [c for c in offered if c.op == op],
        waivers=WaiverBook(),
        link=link,
    )
    return create_plan(
        inputs,
        model={},
        settings={},
        kv_bytes_per_token=100,
        steps=steps,
        world_size=world_size,
        **({"is_strict": False} | fields),
    )


def test_a_report_has_as_data_what_a_strict_plan_raises(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    sites = [OpSite(site="layers.*.up", request=gemm(), layers=(0, 1, 2))]
    offered = [
        candidate("toy.best", Tier.NATIVE, unmet=[ReasonKind.SOFTWARE, ReasonKind.MISSING]),
        candidate("toy.slow", Tier.PORTABLE),
    ]
    with pytest.raises(PlanError) as raised:
        report(sites, offered, fast, is_strict=True)
    plan = report(sites, offered, fast)
    assert [v.text for v in plan.violations] == [
        "toy.slow is portable; toy.best is native (software limit: required more, found less; "
        "missing limit: required more, found less)"
    ]
    assert violation_lines(plan.violations)[0] in raised.value.found
    document = plan.to_dict()
    assert document["violations"][0]["kind"] == "lost fast path"
    assert document["ops"][0]["lost"] == {
        "better": "toy.best",
        "better_tier": "native",
        "unlock": [
            "install: more",
            "write the kernel: missing limit less (it takes more)",
        ],
        "why": plan.violations[0].text,
    }


def test_what_nothing_serves_is_a_violation_and_hides_no_other_site(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    sites = [
        OpSite(site="a", request=gemm(n=128)),
        OpSite(site="b", request=gemm()),
    ]

    def only_small(request: Any) -> list[Reason]:
        return [] if request.n <= 64 else [Reason(what="n", required="64", found=str(request.n))]

    offered = [candidate("toy.ok", not_supported_reasons=only_small)]
    with pytest.raises(UnservedRequestError):
        report(sites, offered, fast, is_strict=True)
    plan = report(sites, offered, fast)
    assert [op.site.site for op in plan.ops] == ["b"]
    (violation,) = plan.violations
    assert violation.site == "a"
    assert violation.to_dict()["kind"] == "unserved"
    assert "n: required 64, found 128" in violation.text


def test_an_explicit_choice_that_cannot_serve_raises_in_a_report_too(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    inputs = PlanInputs(
        sites=[OpSite(site="a", request=gemm())],
        device=fast,
        policy=DevicePolicy(),
        candidates=lambda op, _: [candidate("toy.no", unmet=[ReasonKind.HARDWARE])],
        waivers=WaiverBook(),
        use={"gemm": "toy.no"},
    )
    with pytest.raises(SelectionError, match="never degraded"):
        create_plan(inputs, model={}, settings={}, kv_bytes_per_token=1, is_strict=False)


def test_a_step_is_the_sum_of_its_calls_and_a_lost_path_costs_the_difference_of_the_bounds(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    request = gemm(n=64, k=32, tokens=TokenRange(1, 64))
    sites = [OpSite(site="layers.*.up", request=request, layers=(0, 1, 2))]
    own = Work(flops=2.0 * 4 * 64 * 32, bytes=1.0e6, unit="float32")
    offered = [
        candidate("toy.best", Tier.NATIVE, unmet=[ReasonKind.ARGUMENT]),
        candidate("toy.copies", Tier.TUNED, work=lambda r, t: own),
    ]
    (step,) = report(sites, offered, fast).steps
    (site,) = step.sites
    weight, rows, written = 64 * 32 * 4, 4 * 32 * 4, 4 * 64 * 4
    ideal = (weight + rows + written) / BANDWIDTH * 1e6
    assert site.calls == 3
    assert site.us == pytest.approx(3 * 1.0e6 / BANDWIDTH * 1e6)
    assert site.by == "memory"
    assert site.better == "toy.best"
    assert site.lost_us == pytest.approx(3 * (1.0e6 / BANDWIDTH * 1e6 - ideal))
    assert step.total_us == site.us
    assert step.share(site.lost_us) == pytest.approx(site.lost_us / site.us)


def test_a_step_takes_the_range_its_tokens_fall_into_and_only_its_phase(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    def work(us: float) -> Any:
        return lambda r, t: Work(flops=0, bytes=us * BANDWIDTH / 1e6, unit="float32")

    sites = [
        OpSite(site="any", request=gemm(tokens=TokenRange(1, 64))),
        OpSite(site="decode", request=gemm(phase="decode", tokens=TokenRange(1, 8))),
        OpSite(site="prefill", request=gemm(phase="prefill", tokens=TokenRange(1, 64))),
    ]
    offered = [
        candidate("toy.few", us=lambda t: 1.0 if t <= 4 else 100.0, work=work(5.0)),
        candidate("toy.many", us=10.0, work=work(7.0)),
    ]
    steps = [Step(phase="decode", tokens=2), Step(phase="prefill", tokens=64)]
    small, large = report(sites, offered, fast, steps=steps).steps
    assert {s.site: s.us for s in small.sites} == pytest.approx({"any": 5.0, "decode": 5.0})
    assert {s.site: s.us for s in large.sites} == pytest.approx({"any": 7.0, "prefill": 7.0})
    # More tokens than a site ever sees in one call: it is called at its most.
    (huge,) = report(sites, offered, fast, steps=[Step(phase="decode", tokens=999)]).steps
    assert {s.site for s in huge.sites} == {"any", "decode"}


def test_only_rows_that_get_logits_go_through_the_head(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    body = OpSite(site="body", request=gemm(tokens=TokenRange(1, 64)))
    head = OpSite(site="head", request=gemm(tokens=TokenRange(1, 64)), is_sampled=True)
    steps = [Step(phase="decode", tokens=7), Step(phase="prefill", tokens=64)]
    decode, prefill = report([body, head], [candidate("toy.ok")], fast, steps=steps).steps
    assert [site.rows for site in decode.sites] == [7, 7]
    assert [site.rows for site in prefill.sites] == [64, 1]
    (one,) = report([body], [candidate("toy.ok")], fast, steps=[Step(phase="any", tokens=1)]).steps
    assert prefill.sites[1].us == pytest.approx(one.sites[0].us)


def test_a_range_of_the_head_is_that_of_the_rows_it_gets(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    head = OpSite(site="head", request=gemm(tokens=TokenRange(1, 64)), is_sampled=True)
    offered = [
        candidate("toy.few", us=lambda t: 1.0 if t <= 4 else 100.0),
        candidate("toy.many", us=10.0),
    ]
    (step,) = report([head], offered, fast, steps=[Step(phase="prefill", tokens=64)]).steps
    assert [site.choice for site in step.sites] == ["toy.few"]


def test_bytes_alone_are_a_limit_of_a_step_and_operations_alone_tell_nothing(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    sites, offered = [OpSite(site="up", request=gemm())], [candidate("toy.ok")]
    whole = report(sites, offered, fast).steps[0]
    slow = dataclasses.replace(fast, peak_flops={"bfloat16": 1e12})
    (step,) = report(sites, offered, slow).steps
    assert (step.partial, step.unknown, step.is_telling) == (("up",), (), True)
    assert 0 < step.total_us <= whole.total_us
    assert step.to_dict()["partial"] == ["up"]
    dark = dataclasses.replace(fast, memory_bandwidth=None)
    (step,) = report(sites, offered, dark).steps
    assert (step.partial, step.is_telling) == (("up",), False)


def test_nothing_is_said_to_be_lost_against_half_of_the_better_ones_work(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    sites = [OpSite(site="up", request=gemm())]
    offered = [
        candidate(
            "toy.best",
            Tier.NATIVE,
            unmet=[ReasonKind.SOFTWARE],
            work=lambda r, t: Work(flops=1e9, bytes=1e3, unit="fp8"),
        ),
        candidate(
            "toy.slow",
            Tier.PORTABLE,
            work=lambda r, t: Work(flops=1e9, bytes=4e3, unit="float32"),
        ),
    ]
    (step,) = report(sites, offered, fast).steps
    assert step.sites[0].lost_us is None
    known = dataclasses.replace(fast, peak_flops=RATES | {"fp8": 1e13})
    (step,) = report(sites, offered, known).steps
    assert step.sites[0].lost_us is not None


def test_without_a_rate_there_is_no_bound_and_the_step_says_where(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    unknown = dataclasses.replace(fast, peak_flops={"bfloat16": 1e12}, memory_bandwidth=None)
    plan = report([OpSite(site="up", request=gemm())], [candidate("toy.ok")], unknown)
    assert plan.steps[0].unknown == ("up",)
    assert plan.steps[0].total_us == 0
    assert plan.to_dict()["steps"][0]["sites"][0]["share"] is None


def test_a_collective_is_bound_by_the_link_and_by_nothing_else(
    candidate: Any, fast: DeviceSpec
) -> None:
    request = CollectiveRequest(
        kind="all_reduce", world_size=4, width=1024, dtype="float32", tokens=TokenRange(1, 64)
    )
    sites = [OpSite(site="layers.*.sum", request=request, layers=(0, 1), ranks=(0, 1, 2, 3))]
    offered = [candidate("toy.sum", op="collective")]
    link = GroupLink(kind="pcie", bandwidth_bytes_per_s=1.0e9, latency_us=20.0)
    (step,) = report(sites, offered, fast, link=link, world_size=4).steps
    sent = 4 * 1024 * 4 * 2 * 3 / 4
    assert step.total_us == pytest.approx(2 * (20.0 + sent / 1.0e9 * 1e6))
    assert step.sites[0].by == "link"
    (bare,) = report(sites, offered, fast, world_size=4).steps
    assert bare.unknown == ("layers.*.sum",)


def test_figures_that_nobody_verified_are_named(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    hearsay = Evidence(source="a forum", found="?", confidence=Confidence.UNVERIFIED)
    doubtful = dataclasses.replace(
        fast, evidence={"peak_flops.float32": hearsay, "peak_flops.int8": hearsay}
    )
    sites = [OpSite(site="up", request=gemm())]
    notes = report(sites, [candidate("toy.ok")], doubtful).notes
    assert list(notes) == [
        "times rest on unverified figures: peak rate of float32 (a forum)"  # int8 is not used here
    ]
    assert not report(sites, [candidate("toy.ok")], fast).notes


def test_measured_rates_and_times_do_not_change_the_hash(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    sites = [OpSite(site="up", request=gemm())]
    one = report(sites, [candidate("toy.ok")], fast)
    other = report(
        sites, [candidate("toy.ok")], dataclasses.replace(fast, memory_bandwidth=9.9e9), steps=()
    )
    assert one.hash == other.hash


def test_the_fullest_rank_decides_how_many_tokens_fit(
    candidate: Any, gemm: Any, fast: DeviceSpec
) -> None:
    roomy = dataclasses.replace(fast, memory_bytes=10_000_000)
    table = EmbeddingRequest(vocab_size=10, hidden_size=8, dtype="float32")
    sites = [
        OpSite(site="embed", request=table, ranks=(0,)),
        OpSite(site="layers.*.up", request=gemm(phase="prefill"), layers=(0, 1), ranks=(0, 1)),
        OpSite(site="layers.*.up", request=gemm(phase="decode"), layers=(0, 1), ranks=(0, 1)),
    ]
    offered = [candidate("toy.ok"), candidate("toy.embed", op="embedding")]
    need = report(sites, offered, roomy, world_size=2).memory
    assert need is not None
    assert need.weight_bytes == 2 * 64 * 32 * 4 + 10 * 8 * 4  # one weight for both phases
    assert need.kv_bytes_per_token_of_rank == 50
    assert need.kv_tokens == (9_000_000 - need.weight_bytes) // 50
    assert need.fits
    tiny = dataclasses.replace(fast, memory_bytes=1000)
    full = report(sites, offered, tiny, world_size=2).memory
    assert full is not None
    assert (full.fits, full.kv_tokens) == (False, 0)
    blind = report(sites, offered, dataclasses.replace(fast, memory_bytes=0)).memory
    assert blind is not None
    assert (blind.fits, blind.kv_tokens) == (None, None)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (ReasonKind.SOFTWARE, "install: flash-attn>=2.7"),
        (ReasonKind.MISSING, "write the kernel: x none (it takes flash-attn>=2.7)"),
        (ReasonKind.UNVERIFIED, "verify: x flash-attn>=2.7 (found none)"),
        (ReasonKind.HARDWARE, None),
        (ReasonKind.SCOPE, None),
    ],
)
def test_an_unlock_says_what_to_do(kind: ReasonKind, step: str | None) -> None:
    reason = Reason(what="x", required="flash-attn>=2.7", found="none", kind=kind)
    assert unlocks_of([reason, reason]) == (() if step is None else (step,))


def test_a_kernel_that_is_not_there_at_all_is_named() -> None:
    reason = Reason(what="kernel", required="a.b", found="not written yet", kind=ReasonKind.MISSING)
    assert unlocks_of([reason]) == ("write the kernel: a.b",)


def test_the_link_of_a_group_follows_from_the_attributes(fast: DeviceSpec) -> None:
    evidence = Evidence(source="lab", found="26.4 GB/s", confidence=Confidence.MEASURED)
    card = dataclasses.replace(
        fast,
        torch_device="cuda",
        attributes={
            "fabric": "none",
            "p2p": "claimed",
            "host_link_bytes_per_s": 63e9,
            "link_bytes_per_s.4": 26.4e9,
            "link_latency_us.4": 13.5,
            "distance": "SYS",
        },
        evidence={"attributes.link_bytes_per_s.4": evidence},
    )
    four = group_link_of(card, 4)
    assert (four.kind, four.p2p, four.is_full_mesh, four.distance) == (
        "pcie", "claimed", False, "SYS",
    )  # fmt: skip
    assert (four.bandwidth_bytes_per_s, four.latency_us) == (26.4e9, 13.5)
    assert four.evidence == evidence
    eight = group_link_of(card, 8)
    assert eight.bandwidth_bytes_per_s == 63e9
    nvlink = dataclasses.replace(card, attributes={"fabric": "nvlink", "p2p": "verified"})
    assert group_link_of(nvlink, 8) == GroupLink(kind="nvlink", p2p="verified")
    assert group_link_of(fast, 2).kind == "host"


def test_sites_that_lost_the_same_share_a_line_and_waivers_do_not_flood(
    gemm: Any, device: DeviceSpec
) -> None:
    def lost(site: str, op: str) -> Violation:
        waiver = waiver_text(gemm(), site, device, kind="tier")
        return Violation(site=site, label=op, tokens="1-8", text=f"{op} is slow", waiver=waiver)

    many = [lost(f"layers.*.{n}", "gemm") for n in range(9)] + [lost("head", "norm.rms")]
    lines = violation_lines([*many, many[0]])
    assert lines == [
        f"{', '.join(f'layers.*.{n}' for n in range(9))} (gemm, 1-8 tokens): gemm is slow",
        "head (norm.rms, 1-8 tokens): norm.rms is slow",
    ]
    error = violation_error("toy", many)
    assert error.remedy.count("[[waiver]]") == 8
    assert "2 more" in error.remedy
    assert "--waiver-template" in error.remedy
    flood = violation_error("toy", [lost("x", f"op{n}") for n in range(30)])
    assert "op11 is slow" in flood.found
    assert "op12 is slow" not in flood.found
    assert "18 more" in flood.found


def test_a_step_of_which_little_is_known_has_no_sum_to_show() -> None:
    def site(us: float | None) -> SiteCost:
        return SiteCost(
            site="s", op="o", choice="c", tier="native", calls=1, rows=1, us=us, by=None
        )

    def step(*times: float | None) -> StepEstimate:
        return StepEstimate(phase="decode", tokens=1, sites=tuple(site(us) for us in times))

    assert step(1.0, None).is_telling
    assert not step(1.0, None, None).is_telling
    assert not step().is_telling


def test_a_template_has_no_waiver_that_an_earlier_one_makes_needless(
    gemm: Any, device: DeviceSpec
) -> None:
    def violation(site: str, op: Any) -> Violation:
        text = waiver_text(op, site, device, kind="tier")
        return Violation(site=site, label=op.label, tokens="1", text="", waiver=text)

    copy = EmbeddingRequest(vocab_size=8, hidden_size=8, dtype="float32")
    wide, narrow = violation("layers.*.up", gemm()), violation("layers.*.shared.up", gemm())
    other = violation("layers.*.shared.up", copy)
    assert waiver_stanzas([wide, narrow, other, wide]) == [wide.waiver, other.waiver]
    # The narrow one first is used for its calls, and the wide one for the rest.
    assert waiver_stanzas([narrow, wide]) == [narrow.waiver, wide.waiver]
