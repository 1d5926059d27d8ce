"""Makes plans: asks every backend for candidates, selects per site and range, and is strict.

A lost fast path is an error before any weight is read, unless a waiver names it; all of them are
reported together, each with the waiver that would allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hal.candidates import KernelCandidate
from hal.device import DevicePolicy, DeviceSpec
from hal.errors import PlanError, RequestError
from hal.ops import CATALOGUE
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import OpRequest
from hal.plan import OpSite, Plan, PlannedOp
from hal.ranges import decide_ranges
from hal.roofline import bound_of, step_bound_us
from hal.selection import Decision, SelectionRules, select
from hal.suggestions import did_you_mean
from hal.waivers import Waiver, WaiverBook, waiver_text

CandidateSource = Callable[[str, DeviceSpec], Sequence[KernelCandidate]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is made from. `use` is the explicit choice per op (`--use`)."""

    sites: Sequence[OpSite]
    device: DeviceSpec
    policy: DevicePolicy
    candidates: CandidateSource
    waivers: WaiverBook
    use: Mapping[str, str] = field(default_factory=dict)
    allowed_semantics: frozenset[str] = frozenset()


def plan_ops(
    inputs: PlanInputs, *, on_decision: Callable[[Decision], None] | None = None
) -> list[PlannedOp]:
    """Decides every site.

    Raises SelectionError (an explicit choice that cannot serve, a request that nothing serves),
    PlanError (lost fast paths without waiver, all of them; a `--use` that decides nothing),
    RequestError (an op that the catalogue does not have) and WaiverError.
    """
    _check_use(inputs)
    planned: list[PlannedOp] = []
    violations: list[str] = []
    stanzas: list[str] = []
    for site in inputs.sites:
        ops, problems, waivers = _plan_site(inputs, site)
        planned += ops
        violations += [p for p in problems if p not in violations]
        stanzas += [w for w in waivers if w not in stanzas]
    for op in planned:
        if on_decision is not None:
            on_decision(op.decision)
    if violations:
        raise PlanError(
            f"plan for {inputs.device.name} ({inputs.device.device_id})",
            "the best tier known for this device at every call site",
            "lost fast paths:\n    - " + "\n    - ".join(violations),
            "install or enable what the reasons name; or allow it in the waiver file:\n"
            + "\n\n".join(stanzas),
        )
    inputs.waivers.check_after_planning(
        [(s, site.request) for site in inputs.sites for s in site.names()]
    )
    return planned


def _check_use(inputs: PlanInputs) -> None:
    """Every `--use` key must name an op of this plan: an ignored request is an error."""
    known = {site.request.label for site in inputs.sites} | {s.request.op for s in inputs.sites}
    rules = SelectionRules(explicit=inputs.use)
    decides = {rules.explicit_key(site.request) for site in inputs.sites}
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


def _plan_site(inputs: PlanInputs, site: OpSite) -> tuple[list[PlannedOp], list[str], list[str]]:
    request = site.request
    candidates = inputs.candidates(request.op, inputs.device)
    semantic = inputs.waivers.find(request, site.site, inputs.device, kind="semantic")
    asked = SelectionRules(
        explicit=inputs.use, allowed_semantics=inputs.allowed_semantics, policy=inputs.policy
    )
    rules = asked if semantic is None else replace(asked, allowed_semantics=frozenset({"*"}))

    def choose(part: OpRequest, held: str | None) -> Decision:
        return select(part, candidates, rules, held=held)

    ops: list[PlannedOp] = []
    problems: list[str] = []
    stanzas: list[str] = []
    for tokens, decision in decide_ranges(request, choose, is_weighted=_is_weighted(site)):
        waivers: list[Waiver | None] = []
        if not all(asked.allows(note) for note in decision.semantic_notes):
            waivers.append(inputs.waivers.match(request, site.site, inputs.device, "semantic"))
        if decision.lost is not None:
            waivers.append(inputs.waivers.match(request, site.site, inputs.device, "tier"))
            if waivers[-1] is None:
                lost = decision.lost.describe(decision.choice)
                problems.append(f"{site.site} ({request.label}, {tokens} tokens): {lost}")
                stanzas.append(waiver_text(request, site.site, inputs.device, kind="tier"))
        text = "; ".join(w.describe() for w in waivers if w is not None) or None
        bound = bound_of(request, tokens.high, inputs.device)
        ops.append(PlannedOp(site=site, tokens=tokens, decision=decision, waiver=text, bound=bound))
    return ops, problems, stanzas


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
    notes: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
    world_size: int = 1,
    on_decision: Callable[[Decision], None] | None = None,
) -> Plan:
    """A plan for `world_size` ranks of the same device."""
    ops = plan_ops(inputs, on_decision=on_decision)
    return Plan(
        model=model,
        devices=[inputs.device.to_dict() | {"rank": rank} for rank in range(world_size)],
        settings=settings,
        kv_bytes_per_token=kv_bytes_per_token,
        ops=ops,
        notes=[*notes, *_copy_notes(ops)],
        versions=versions or {},
        policy={
            "forced_features": inputs.policy.forced_features,
            "disabled": inputs.policy.disabled,
        },
        decode_bound_us=_decode_bound_us(inputs) if world_size == 1 else None,
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


def _copy_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Where ranges of one site pack the weight differently, the memory holds it more than once."""
    layouts: dict[OpSite, set[str]] = {}
    for op in ops:
        if _is_weighted(op.site):
            layouts.setdefault(op.site, set()).add(op.choice.weight_layout or op.choice.name)
    sites: dict[tuple[str, ...], list[str]] = {}
    extra: dict[tuple[str, ...], int] = {}
    for site, held in layouts.items():
        if len(held) > 1:
            key = tuple(sorted(held))
            sites.setdefault(key, []).append(site.site)
            extra[key] = extra.get(key, 0) + _weight_bytes(site) * (len(held) - 1)
    return [
        f"weights are held {len(held)} times ({', '.join(held)}), {extra[held] / 2**20:,.0f} MiB "
        f"more: {', '.join(names)}"
        for held, names in sites.items()
    ]


def _weight_bytes(site: OpSite) -> int:
    """Bytes of the weights of all layers of a site, as stored."""
    request = site.request
    if isinstance(request, GemmRequest | GroupedGemmRequest):
        experts = request.num_experts if isinstance(request, GroupedGemmRequest) else 1
        stored = request.weight_format.weight_bytes(request.n, request.k)
        return stored * experts * max(1, len(site.layers))
    return 0
