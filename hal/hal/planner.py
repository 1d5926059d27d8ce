"""Makes plans: asks every backend for candidates, selects per site and range, and is strict.

A lost fast path is an error before any weight is read, unless a waiver names it; all of them are
reported together, each with the waiver that would allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hal.candidates import KernelCandidate
from hal.captured_steps import CaptureScope, captured_buckets, reason_within
from hal.decided_notes import decided_notes, rate_notes
from hal.device import DevicePolicy, DeviceSpec
from hal.device_group import GroupLink
from hal.errors import PlanError, RequestError, UnservedRequestError, WaiverError
from hal.joins import JoinedSite, JoinedSites, join_sites
from hal.memory_need import memory_need
from hal.ops import CATALOGUE
from hal.ops.request import OpRequest, TokenRange
from hal.plan import OpSite, Plan, PlannedOp
from hal.ranges import decide_ranges
from hal.roofline import bound_of, step_bound_us
from hal.selection import Decision, LostFastPath, SelectionRules, select
from hal.step_costs import Step, estimate_step
from hal.suggestions import did_you_mean
from hal.tiers import Tier
from hal.violations import Violation, violation_error
from hal.waivers import Waiver, WaiverBook, waiver_text

CandidateSource = Callable[[str, DeviceSpec], Sequence[KernelCandidate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is made from. `use` is the explicit choice per op (`--use`); `link` is what links
    the devices of a group, None for one device. joins: calls that may take the place of several of
    the sites, see `hal.joins`. captures: decode steps that the engine would capture. is_to_run: the
    plan will be executed, so that a waiver may be needed once kernels are compiled."""

    sites: Sequence[OpSite]
    device: DeviceSpec
    policy: DevicePolicy
    candidates: CandidateSource
    waivers: WaiverBook
    use: Mapping[str, str] = field(default_factory=dict)
    allowed_semantics: frozenset[str] = frozenset()
    link: GroupLink | None = None
    joins: Sequence[JoinedSite] = ()
    captures: CaptureScope | None = None
    is_to_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOps:
    """The decided sites and what is wrong with them. notes: of joins that were not taken.
    pending_waivers: see `Plan`."""

    ops: Sequence[PlannedOp]
    violations: Sequence[Violation]
    notes: Sequence[str] = ()
    pending_waivers: Sequence[WaiverError] = ()


def plan_ops(
    inputs: PlanInputs,
    *,
    is_strict: bool = True,
    on_decision: Callable[[Decision], None] | None = None,
) -> PlannedOps:
    """Decides every site.

    is_strict: a lost fast path or an unserved request raises; otherwise it is a violation of the
    answer, and a site that nothing serves is not among the ops.
    Raises SelectionError (an explicit choice that cannot serve, a request that nothing serves),
    PlanError (lost fast paths without waiver, all of them; a `--use` that decides nothing),
    RequestError (an op that the catalogue does not have) and WaiverError.
    """
    _check_use(inputs)
    inputs = replace(inputs, candidates=_asked_once(inputs))
    joined = _join(inputs)
    inputs = replace(inputs, sites=joined.sites)
    planned: list[PlannedOp] = []
    violations: list[Violation] = []
    sites = [part for site in inputs.sites for part in _split_by_waivers(inputs, site)]
    captured = _captured(inputs, sites)
    for site in sites:
        try:
            ops, problems = _plan_site(inputs, site, captured)
        except UnservedRequestError as error:
            if is_strict:
                raise
            ops, problems = [], [_unserved(site, error)]
        planned += ops
        violations += problems
    for op in planned:
        if on_decision is not None:
            on_decision(op.decision)
    if violations and is_strict:
        raise violation_error(f"{inputs.device.name} ({inputs.device.device_id})", violations)
    pending = inputs.waivers.check_after_planning(
        [(name, site.request) for site in sites for name in site.names()],
        [
            (name, op.site.request)
            for op in planned
            if _may_not_compile(inputs, op)
            for name in op.site.names()
        ],
    )
    return PlannedOps(
        ops=planned, violations=violations, notes=joined.notes, pending_waivers=pending
    )


def _may_not_compile(inputs: PlanInputs, op: PlannedOp) -> bool:
    """Whether a plan that is to be executed chose a kernel that its first call compiles."""
    return inputs.is_to_run and any(leaf.kind == "kernel" for leaf in op.choice.leaf)


def _join(inputs: PlanInputs) -> JoinedSites:
    """The sites with the joined ones that are better than their parts."""
    rules = SelectionRules(
        explicit=inputs.use, allowed_semantics=inputs.allowed_semantics, policy=inputs.policy
    )

    def choose(request: OpRequest) -> Decision:
        return select(request, inputs.candidates(request.op, inputs.device), rules)

    def offered(op: str) -> bool:
        found = inputs.candidates(op, inputs.device)
        return any(candidate.tier > Tier.REFERENCE for candidate in found)

    return join_sites(
        inputs.sites, inputs.joins, choose, offered=offered, explicit=frozenset(inputs.use)
    )


def _asked_once(inputs: PlanInputs) -> CandidateSource:
    """The source of candidates, asked once for each op: many sites share one."""
    found: dict[str, Sequence[KernelCandidate]] = {}

    def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
        if op not in found:
            found[op] = inputs.candidates(op, device)
        return found[op]

    return candidates


def _check_use(inputs: PlanInputs) -> None:
    """Every `--use` key must name an op of this plan: an ignored request is an error."""
    sites = [*inputs.sites, *(join.site for join in inputs.joins)]
    known = {site.request.label for site in sites} | {site.request.op for site in sites}
    rules = SelectionRules(explicit=inputs.use)
    decides = {rules.explicit_key(site.request) for site in sites}
    for key in inputs.use:
        who = f"explicit choice --use {key}={inputs.use[key]}"
        if key not in known:
            raise PlanError(who, "an op of this model's plan", key, did_you_mean(key, known))
        if key not in decides:
            raise PlanError(
                who,
                "an op for which no more specific choice is given",
                ", ".join(sorted(k for k in inputs.use if k.startswith(f"{key}."))),
                "remove it",
            )


def _split_by_waivers(inputs: PlanInputs, site: OpSite) -> list[OpSite]:
    """The parts of a site whose layers are covered by the same waivers, decided one by one: what is
    allowed in one layer is not allowed in the others, and not used there."""
    layers_of: dict[tuple[int, ...], list[int]] = {}
    for layer, name in zip(site.layers, site.names(), strict=False):
        covering = inputs.waivers.covering(site.request, name, inputs.device)
        layers_of.setdefault(covering, []).append(layer)
    if len(layers_of) < 2:
        return [site]
    return [replace(site, layers=tuple(layers)) for layers in layers_of.values()]


def _unserved(site: OpSite, error: UnservedRequestError) -> Violation:
    return Violation(
        site=site.site,
        label=site.request.label,
        tokens=str(site.request.tokens),
        text=f"nothing may serve it: {error.found}",
        unserved=error,
    )


def _lost(
    inputs: PlanInputs, site: OpSite, tokens: TokenRange, decision: Decision, lost: LostFastPath
) -> Violation:
    request = site.request
    return Violation(
        site=site.site if site in inputs.sites else site.label(),
        label=request.label,
        tokens=str(tokens),
        text=lost.describe(decision.choice),
        waiver=waiver_text(request, site.site, inputs.device, kind="tier"),
    )


def _captured(inputs: PlanInputs, sites: Sequence[OpSite]) -> Mapping[TokenRange, str]:
    """Sizes of steps that are to be captured although selection would rather not."""
    if inputs.captures is None:
        return {}

    def choose(site: OpSite, part: OpRequest, capture: str) -> Decision:
        candidates = inputs.candidates(part.op, inputs.device)
        return select(part, candidates, _rules(inputs, site)[1], capture=capture)

    try:
        return captured_buckets(sites, inputs.captures, choose)
    except UnservedRequestError:
        return {}  # said where the site is planned


def _rules(inputs: PlanInputs, site: OpSite) -> tuple[SelectionRules, SelectionRules]:
    """The rules as asked for, and with what a waiver allows the site."""
    name = site.names()[0]  # the waivers cover all of them or none
    semantic = inputs.waivers.find(site.request, name, inputs.device, kind="semantic")
    asked = SelectionRules(
        explicit=inputs.use, allowed_semantics=inputs.allowed_semantics, policy=inputs.policy
    )
    if semantic is None:
        return asked, asked
    return asked, replace(asked, allowed_semantics=frozenset({"*"}))


def _plan_site(
    inputs: PlanInputs, site: OpSite, captured: Mapping[TokenRange, str]
) -> tuple[list[PlannedOp], list[Violation]]:
    request = site.request
    name = site.names()[0]
    candidates = inputs.candidates(request.op, inputs.device)
    asked, rules = _rules(inputs, site)
    is_covered = inputs.captures is not None and inputs.captures.covers(site)

    def choose(part: OpRequest, held: str | None) -> Decision:
        why = reason_within(captured, part.tokens) if is_covered else ""
        return select(part, candidates, rules, held=held, capture=why)

    ops: list[PlannedOp] = []
    problems: list[Violation] = []
    for tokens, decision in decide_ranges(request, choose, is_weighted=_is_weighted(site)):
        waivers: list[Waiver | None] = []
        if not all(asked.allows(note) for note in decision.semantic_notes):
            waivers.append(inputs.waivers.match(request, name, inputs.device, "semantic"))
        if decision.lost is not None:
            waivers.append(inputs.waivers.match(request, name, inputs.device, "tier"))
            if waivers[-1] is None:
                problems.append(_lost(inputs, site, tokens, decision, decision.lost))
        better = decision.lost.better if decision.lost else ""
        ops.append(
            PlannedOp(
                site=site,
                tokens=tokens,
                decision=decision,
                waiver="; ".join(w.describe() for w in waivers if w is not None) or None,
                bound=bound_of(request, tokens.high, inputs.device, link=inputs.link),
                better=next((c for c in candidates if c.name == better), None),
            )
        )
    return ops, problems


def _is_weighted(site: OpSite) -> bool:
    op = site.request.op
    if op not in CATALOGUE:
        raise RequestError(
            f"call site {site.site}", "an op of the catalogue", op, did_you_mean(op, CATALOGUE)
        )
    return CATALOGUE[op].is_weighted


def create_plan(
    inputs: PlanInputs,
    *,
    model: Mapping[str, Any],
    settings: Mapping[str, Any],
    kv_bytes_per_token: int,
    kv_copies: int = 1,
    notes: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    world_size: int = 1,
    steps: Sequence[Step] = (),
    is_strict: bool = True,
    on_decision: Callable[[Decision], None] | None = None,
) -> Plan:
    """A plan for `world_size` ranks of the same device.

    kv_bytes_per_token: over all ranks, of one copy; kv_copies: ranks that keep the same rows.
    steps: what the plan estimates times for. is_strict: see `plan_ops`; a plan that is not strict
    has its violations as data.
    """
    planned = plan_ops(inputs, is_strict=is_strict, on_decision=on_decision)
    ops = planned.ops
    return Plan(
        model=model,
        devices=[inputs.device.to_dict() | {"rank": rank} for rank in range(world_size)],
        settings=settings,
        kv_bytes_per_token=kv_bytes_per_token,
        ops=ops,
        notes=[
            *notes,
            *planned.notes,
            *decided_notes(ops),
            *rate_notes(inputs.sites, inputs.device, inputs.link),
        ],
        versions=versions or {},
        policy={
            "forced_features": inputs.policy.forced_features,
            "disabled": inputs.policy.disabled,
        },
        decode_bound_us=_decode_bound_us(inputs) if world_size == 1 else None,
        link=inputs.link,
        steps=[estimate_step(ops, step, inputs.device, inputs.link) for step in steps],
        memory=memory_need(inputs.sites, inputs.device, world_size, kv_bytes_per_token, kv_copies),
        violations=planned.violations,
        pending_waivers=planned.pending_waivers,
    )


def _decode_bound_us(inputs: PlanInputs) -> float | None:
    """Least time of a step that decodes one token; collectives would need the links' rates."""
    calls = [
        (site.request, max(1, len(site.layers)))
        for site in inputs.sites
        if site.request.phase != "prefill"
    ]
    total = step_bound_us(calls, 1, inputs.device)
    return None if total is None else round(total, 1)
