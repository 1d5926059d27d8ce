"""Joined calls: where a plan takes one in place of its parts, what it lists then and says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.candidates import KernelCandidate
from hal.device import DevicePolicy, DeviceSpec
from hal.errors import PlanError, SelectionError
from hal.joins import JoinedPart, JoinedSite
from hal.ops.activation import GatedActivationRequest
from hal.ops.attention import AttentionRequest
from hal.ops.attention_projection import AttentionProjectionRequest
from hal.ops.collective import CollectiveRequest
from hal.ops.collective_norm import AllReduceNormRequest
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.norm import RmsNormRequest
from hal.ops.request import OpRequest, TokenRange
from hal.plan import OpSite
from hal.planner import PlanInputs, PlannedOps, plan_ops
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier
from hal.waivers import WaiverBook

TOKENS = TokenRange(1, 64)
REDUCE = CollectiveRequest(kind="all_reduce", world_size=2, width=8, dtype="float32", tokens=TOKENS)
NORM = RmsNormRequest(hidden_size=8, dtype="float32", has_residual=True, tokens=TOKENS)
BOTH = AllReduceNormRequest(
    kind="all_reduce", world_size=2, width=8, dtype="float32", tokens=TOKENS
)
LAYERS = (0, 1, 2)
SITES = (
    OpSite(site="layers.*.input_norm", request=NORM, layers=(1, 2), ranks=(0, 1)),
    OpSite(site="layers.*.sum", request=REDUCE, layers=LAYERS, ranks=(0, 1)),
    OpSite(site="layers.*.post_norm", request=NORM, layers=LAYERS, ranks=(0, 1)),
)
JOIN = JoinedSite(
    site=OpSite(site="layers.*.both", request=BOTH, layers=LAYERS, ranks=(0, 1)),
    parts=(JoinedPart(site="layers.*.sum"), JoinedPart(site="layers.*.post_norm")),
)
NEXT = JoinedSite(  # the norm of the layer behind; the last sum has none
    site=OpSite(site="layers.*.next", request=BOTH, layers=(0, 1), ranks=(0, 1)),
    parts=(JoinedPart(site="layers.*.sum"), JoinedPart(site="layers.*.input_norm", shift=1)),
)


def up_to(most: int, kind: ReasonKind = ReasonKind.SCOPE) -> Callable[[OpRequest], list[Reason]]:
    def reasons(request: OpRequest) -> list[Reason]:
        found = str(request.tokens)
        if request.tokens.high <= most:
            return []
        return [Reason(what="size", required=f"<= {most}", found=found, kind=kind)]

    return reasons


def planned(
    device: DeviceSpec,
    offered: Sequence[KernelCandidate],
    *,
    sites: Sequence[OpSite] = SITES,
    joins: Sequence[JoinedSite] = (JOIN,),
    use: dict[str, str] | None = None,
) -> PlannedOps:
    inputs = PlanInputs(
        sites=sites,
        joins=joins,
        device=device,
        policy=DevicePolicy(),
        candidates=lambda op, _: [c for c in offered if c.op == op],
        waivers=WaiverBook(),
        use=use or {},
    )
    return plan_ops(inputs, is_strict=use is not None)


def listed(found: PlannedOps) -> set[tuple[str, str, str]]:
    return {(op.site.label(), str(op.tokens), op.choice.name) for op in found.ops}


@pytest.fixture
def parts(candidate: Any) -> list[KernelCandidate]:
    return [candidate("sum", op="collective", us=6.0), candidate("norm", op="norm.rms", us=4.0)]


def test_taken_for_every_size_the_parts_are_gone(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    found = planned(device, [*parts, candidate("both", op="all_reduce_norm", us=7.0)])
    assert listed(found) == {
        ("layers.1–2.input_norm", "1-64", "norm"),
        ("layers.0–2.both", "1-64", "both"),
    }
    assert not found.notes


def test_taken_up_to_a_size_the_parts_keep_the_larger_ones(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    both = candidate("both", op="all_reduce_norm", not_supported_reasons=up_to(16))
    found = planned(device, [*parts, both])
    assert listed(found) == {
        ("layers.1–2.input_norm", "1-64", "norm"),
        ("layers.0–2.both", "1-16", "both"),
        ("layers.0–2.sum", "17-64", "sum"),
        ("layers.0–2.post_norm", "17-64", "norm"),
    }
    (note,) = found.notes
    assert "above 16 tokens: none of both (tuned): size: required <= 16" in note
    assert "layers.0–2.both" in note


def test_a_part_of_another_layer(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    both = candidate("both", op="all_reduce_norm", not_supported_reasons=up_to(8))
    found = planned(device, [*parts, both], joins=[NEXT])
    assert listed(found) == {
        ("layers.0–1.next", "1-8", "both"),
        ("layers.1–2.input_norm", "9-64", "norm"),
        ("layers.0–1.sum", "9-64", "sum"),
        ("layers.2.sum", "1-64", "sum"),
        ("layers.0–2.post_norm", "1-64", "norm"),
    }


@given(
    reduces=st.sets(st.integers(0, 5)),
    norms=st.sets(st.integers(0, 5)),
    most=st.integers(1, 64),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_layer_and_size_is_called_once(
    device: DeviceSpec, candidate: Any, reduces: set[int], norms: set[int], most: int
) -> None:
    """Whatever layers the sites have, no size of a layer is lost or planned twice."""
    offered = [
        candidate("sum", op="collective"),
        candidate("norm", op="norm.rms"),
        candidate("both", op="all_reduce_norm", not_supported_reasons=up_to(most)),
    ]
    sites = [
        replace(site, layers=tuple(sorted(layers)))
        for site, layers in zip(SITES[1:], (reduces, norms), strict=True)
        if layers
    ]
    join = replace(JOIN, site=replace(JOIN.site, layers=tuple(range(6))))
    found = planned(device, offered, sites=sites, joins=[join])
    calls: dict[tuple[str, int], list[int]] = {}
    for op in found.ops:
        names = {"both": ("sum", "post_norm")}
        name = op.site.site.rsplit(".", 1)[1]
        for part in names.get(name, (name,)):
            for layer in op.site.layers:
                sizes = range(op.tokens.low, op.tokens.high + 1)
                calls.setdefault((part, layer), []).extend(sizes)
    wanted = {("sum", layer) for layer in reduces} | {("post_norm", layer) for layer in norms}
    assert set(calls) == wanted
    assert all(sorted(sizes) == list(range(1, 65)) for sizes in calls.values())


@pytest.mark.parametrize(("most", "larger"), [(4, "5-16"), (16, "")])
def test_a_part_of_any_phase_stays_for_the_other_phase_and_the_larger_sizes(
    device: DeviceSpec, candidate: Any, most: int, larger: str
) -> None:
    """A joined call of a decode: prefills still need the part that both phases share."""
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "block_size": 16,
        "dtype": "float32", "kv_dtype": "float32",
    }  # fmt: skip
    few = TokenRange(1, 16)
    product = GemmRequest(
        n=8, k=32, dtype="float32", weight_format=FORMATS["float32"], tokens=TOKENS
    )
    sites = [
        OpSite(
            site="layers.*.attend",
            request=AttentionRequest(phase=phase, tokens=tokens, **fields),
            layers=LAYERS,
        )
        for phase, tokens in (("prefill", TOKENS), ("decode", few))
    ] + [OpSite(site="layers.*.project", request=product, layers=LAYERS)]
    whole = AttentionProjectionRequest(phase="decode", hidden_size=8, tokens=few, **fields)
    join = JoinedSite(
        site=OpSite(site="layers.*.both", request=whole, layers=LAYERS[1:]),
        parts=(
            JoinedPart(site="layers.*.attend", phase="decode"),
            JoinedPart(site="layers.*.project"),
        ),
    )
    offered = [
        candidate("attend", op="attention"),
        candidate("project", op="gemm"),
        candidate("both", op="attention_projection", not_supported_reasons=up_to(most)),
    ]
    found = planned(device, offered, sites=sites, joins=[join])
    calls = {
        (op.site.label(), op.site.request.phase, str(op.tokens), op.choice.name) for op in found.ops
    }
    left = {
        ("layers.1–2.attend", "decode", larger, "attend"),
        ("layers.1–2.project", "decode", larger, "project"),
    }
    assert calls == {
        ("layers.0–2.attend", "prefill", "1-64", "attend"),
        ("layers.0.attend", "decode", "1-16", "attend"),
        ("layers.0.project", "any", "1-64", "project"),
        ("layers.1–2.both", "decode", f"1-{most}", "both"),
        ("layers.1–2.project", "prefill", "1-64", "project"),
    } | (left if larger else set())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tier": Tier.PORTABLE}, "both is portable, the parts are better"),
        ({"us": 9.9}, "both is estimated at 9.9 µs, apart 10.0 µs"),
        ({"unmet": (ReasonKind.HARDWARE,)}, "hardware limit: required more, found less"),
    ],
)
def test_apart_where_that_is_better_and_the_plan_says_why(
    device: DeviceSpec,
    candidate: Any,
    parts: list[KernelCandidate],
    fields: dict[str, Any],
    said: str,
) -> None:
    found = planned(device, [*parts, candidate("both", op="all_reduce_norm", **fields)])
    assert {name for _, _, name in listed(found)} == {"sum", "norm"}
    (note,) = found.notes
    assert "at any size" in note
    assert said in note


@pytest.mark.parametrize(
    ("us", "untuned", "said"),
    [
        (10.0, ("", ""), ""),
        (10.0, ("not measured", "not measured"), ""),
        (9.9, ("guessed", ""), "both is configured without a measurement (guessed), sum is not"),
        (None, ("guessed", ""), "both is configured without a measurement (guessed), sum is not"),
        (None, ("guessed", "guessed"), ""),
        (10.1, ("", ""), "both is estimated at 10.1 µs, apart 10.0 µs"),
        (9.0, ("not measured", ""), ""),  # an estimated gain decides
    ],
)
def test_a_join_that_saves_what_estimates_do_not_count_needs_no_gain(
    device: DeviceSpec, candidate: Any, us: float | None, untuned: tuple[str, str], said: str
) -> None:
    offered = [
        candidate("sum", op="collective", us=6.0, untuned=untuned[1]),
        candidate("norm", op="norm.rms", us=4.0),
        candidate("both", op="all_reduce_norm", us=us, untuned=untuned[0]),
    ]
    found = planned(device, offered, joins=[replace(JOIN, needs_gain=False)])
    assert (("layers.0–2.both", "1-64", "both") in listed(found)) == (not said)
    joins = [note for note in found.notes if "in place of its parts" in note]
    assert len(joins) == bool(said)
    assert not said or said in joins[0]


@pytest.mark.parametrize("needs_gain", [True, False])
@pytest.mark.parametrize("slower", ["sum", "norm"])
def test_a_call_that_is_its_first_part_is_compared_with_that_part(
    device: DeviceSpec, candidate: Any, slower: str, needs_gain: bool
) -> None:
    """Emulated as its first part is, it is no loss for a native second one."""
    tiers = {name: Tier.TUNED if name == slower else Tier.NATIVE for name in ("sum", "norm")}
    offered = [
        candidate("sum", op="collective", tier=tiers["sum"]),
        candidate("norm", op="norm.rms", tier=tiers["norm"]),
        candidate("both", op="all_reduce_norm", tier=Tier.TUNED),
    ]
    found = planned(device, offered, joins=[replace(JOIN, needs_gain=needs_gain)])
    is_joined = ("layers.0–2.both", "1-64", "both") in listed(found)
    assert is_joined == (slower == "sum" and not needs_gain)


@pytest.mark.parametrize("most", [8, 64])
def test_a_second_join_of_the_same_parts_leaves_the_sizes_above_the_first_apart(
    device: DeviceSpec, candidate: Any, most: int
) -> None:
    """No size of a part is planned twice, nor by a join that starts at the smallest size again."""
    offered = [
        candidate("sum", op="collective", us=6.0),
        candidate("norm", op="norm.rms", us=4.0),
        candidate("both", op="all_reduce_norm", us=1.0, not_supported_reasons=up_to(most)),
    ]
    again = replace(JOIN, site=replace(JOIN.site, site="layers.*.again"))
    found = planned(device, offered, joins=[JOIN, again])
    left = {("layers.0–2.sum", "9-64", "sum"), ("layers.0–2.post_norm", "9-64", "norm")}
    both = ("layers.0–2.both", f"1-{most}", "both")
    norms = {("layers.1–2.input_norm", "1-64", "norm")}
    assert listed(found) == {both} | norms | (left if most == 8 else set())


def test_a_better_one_that_is_out_of_reach_is_named(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    """Not taken at a lower tier: that would be a fast path lost by joining."""
    low = candidate("both", Tier.PORTABLE, op="all_reduce_norm")
    lost = candidate("fast", Tier.NATIVE, op="all_reduce_norm", unmet=(ReasonKind.SOFTWARE,))
    found = planned(device, [*parts, low, lost])
    assert not found.violations
    (note,) = found.notes
    assert "fast: software limit: required more, found less" in note


def test_where_nothing_is_offered_nothing_is_said(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    golden = candidate("golden", Tier.REFERENCE, op="all_reduce_norm")
    found = planned(device, [*parts, golden])
    assert {name for _, _, name in listed(found)} == {"sum", "norm"}
    assert not found.notes


def test_an_explicit_choice_of_what_is_not_offered_is_taken_or_an_error(
    device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]
) -> None:
    """A key of --use that decides nothing would be ignored without a word."""
    golden = candidate("golden", Tier.REFERENCE, op="all_reduce_norm")
    taken = planned(device, [*parts, golden], use={"all_reduce_norm": "golden"})
    assert ("layers.0–2.both", "1-64", "golden") in listed(taken)
    with pytest.raises(SelectionError, match="nobody"):
        planned(device, [*parts, golden], use={"all_reduce_norm": "nobody"})


def test_explicit_choices(device: DeviceSpec, candidate: Any, parts: list[KernelCandidate]) -> None:
    slow = candidate("both", op="all_reduce_norm", us=99.0, not_supported_reasons=up_to(4))
    offered = [*parts, slow]
    taken = planned(device, offered, use={"all_reduce_norm": "both"})
    assert ("layers.0–2.both", "1-4", "both") in listed(taken)
    quick = [*parts, candidate("both", op="all_reduce_norm", us=1.0)]
    apart = planned(device, quick, use={"collective.all_reduce": "sum"})
    assert {name for _, _, name in listed(apart)} == {"sum", "norm"}
    assert "collective.all_reduce was chosen explicitly" in apart.notes[0]
    with pytest.raises(SelectionError, match="never degraded"):
        planned(
            device,
            [*parts, candidate("both", op="all_reduce_norm", unmet=(ReasonKind.ARGUMENT,))],
            use={"all_reduce_norm": "both"},
        )
    with pytest.raises(PlanError, match="all_reduce_norm"):
        planned(device, offered, joins=[], use={"all_reduce_norm": "both"})


def test_a_choice_for_an_op_that_is_also_a_parts_is_no_wish_to_join(
    device: DeviceSpec, candidate: Any
) -> None:
    """The product per expert with its activation is the product per expert: a library's that is
    chosen for it may not know the activation, and then the calls stay apart without an error."""
    experts: dict[str, Any] = {
        "num_experts": 4, "experts_per_token": 2, "n": 8, "k": 8, "dtype": "float32",
        "weight_format": FORMATS["float32"], "tokens": TOKENS,
    }  # fmt: skip
    behind = GatedActivationRequest(
        width=4, dtype="float32", rows_per_token=2, clamp=1.0, tokens=TOKENS
    )
    gated = GroupedGemmRequest(epilogue="silu_gated", clamp=1.0, **experts)
    sites = [
        OpSite(site="layers.*.up", request=GroupedGemmRequest(**experts), layers=LAYERS),
        OpSite(site="layers.*.act", request=behind, layers=LAYERS),
    ]
    join = JoinedSite(
        site=OpSite(site="layers.*.both", request=gated, layers=LAYERS),
        parts=(JoinedPart(site="layers.*.up"), JoinedPart(site="layers.*.act")),
        needs_gain=False,
    )

    def plain(request: Any) -> list[Reason]:
        is_plain = request.epilogue == "none"
        kind = ReasonKind.SCOPE
        return [] if is_plain else [Reason(what="epilogue", required="none", found="a", kind=kind)]

    offered = [
        candidate("ours", op="grouped_gemm"),
        candidate("theirs", op="grouped_gemm", not_supported_reasons=plain),
        candidate("act", op="activation.gated"),
    ]

    def taken(use: dict[str, str]) -> tuple[set[tuple[str, str]], list[str]]:
        found = planned(device, offered, sites=sites, joins=[join], use=use)
        notes = [note for note in found.notes if "in place of its parts" in note]
        return {(label, name) for label, _, name in listed(found)}, notes

    both = {("layers.0–2.both", "ours")}
    assert taken({}) == (both, [])
    assert taken({"grouped_gemm": "ours"}) == (both, [])
    apart, notes = taken({"grouped_gemm": "theirs"})
    assert apart == {("layers.0–2.up", "theirs"), ("layers.0–2.act", "act")}
    assert len(notes) == 1
    for use in ({"activation.gated": "act"}, {"activation.gated": "act", "grouped_gemm": "ours"}):
        apart, notes = taken(use)
        assert apart == {("layers.0–2.up", "ours"), ("layers.0–2.act", "act")}
        assert "activation.gated was chosen explicitly" in notes[0]
