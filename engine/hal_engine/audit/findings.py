"""What an audit of a model found: losses with their gate class, place, cost and evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hal.auditing.document import Evidence, Finding, Row
from hal.auditing.gates import GateClass, Severity
from hal.plan import OpSite, PlannedOp
from hal.unlocks import unlocks_of
from hal_engine.audit.inspecting import Divergence, Inspector, NonFinite
from hal_engine.audit.load import Load, what_is_counted
from hal_engine.audit.observer import SiteRecord
from hal_engine.audit.step_mode import OutsideOp

_MOST_SITES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSite:
    """A record with the row made of it."""

    record: SiteRecord
    row: Row


def site_label(sites: Sequence[SeenSite]) -> str:
    """One name for call sites of one pattern: the site itself, or its pattern with layers."""
    names = dict.fromkeys(seen.record.site for seen in sites)
    if len(names) == 1:
        return next(iter(names))
    site = sites[0].record.planned.site
    layers = sorted({s.row.layer for s in sites if s.row.layer is not None})
    if "*" not in site.site or not layers:
        return ", ".join(names)
    return OpSite(site=site.site, request=site.request, layers=tuple(layers)).label()


def _grouped(sites: Iterable[SeenSite], key: Callable[[SeenSite], object]) -> list[list[SeenSite]]:
    groups: dict[object, list[SeenSite]] = {}
    for seen in sites:
        pattern = seen.record.planned.site.site
        groups.setdefault((pattern, seen.row.phase, seen.row.tokens, key(seen)), []).append(seen)
    return list(groups.values())


def _time(sites: Sequence[SeenSite]) -> float | None:
    times = [seen.row.time_us for seen in sites if seen.row.time_us is not None]
    return sum(times) if times else None


def _share(us: float | None, all_us: float) -> float | None:
    """Of all the time; sums that are rounded apart are no more than all of it."""
    return min(1.0, us / all_us) if us is not None and all_us else None


def _finding(
    sites: Sequence[SeenSite], all_us: float, rule: str, gate: GateClass, **fields: object
) -> Finding:
    """A finding about calls of one pattern and range."""
    us = _time(sites)
    return Finding.model_validate(
        {
            "rule": rule,
            "gate": gate,
            "op": sites[0].record.planned.site.request.label,
            "site": site_label(sites),
            "calls": sum(seen.row.calls for seen in sites),
            "time_us": us,
            "time_share": _share(us, all_us),
            **fields,
        }
    )


def lost_paths(sites: Sequence[SeenSite], all_us: float) -> list[Finding]:
    """Lost fast paths of the plan, with the waiver that allows each."""
    lost = [s for s in sites if s.record.planned.decision.lost is not None and s.row.calls]
    return [_lost_path(group, all_us) for group in _grouped(lost, lambda s: s.row.implementation)]


def _lost_path(sites: Sequence[SeenSite], all_us: float) -> Finding:
    planned = sites[0].record.planned
    lost = planned.decision.lost
    if lost is None:
        raise ValueError("a lost fast path is required")
    gains = [loser.gain_us for s in sites for loser in s.row.losers if loser.name == lost.better]
    known = [gain for gain in gains if gain is not None]
    return _finding(
        sites,
        all_us,
        "lost-fast-path",
        GateClass.LOST_FAST_PATH,
        severity=Severity.ERROR,
        title=lost.describe(planned.choice),
        evidence=[Evidence(what=r.what, required=r.required, found=r.found) for r in lost.reasons],
        remedy="; ".join(unlocks_of(lost.reasons)) or "write or install an implementation",
        cost_us=sum(known) if known else None,
        waiver=planned.waiver,
    )


def semantic_changes(
    sites: Sequence[SeenSite], all_us: float, allowed: Callable[[str], bool]
) -> list[Finding]:
    """Numbers that differ beyond rounding from what was asked for. allowed: names of notes that
    the user accepted, which are no finding."""
    findings = []
    for group in _grouped((s for s in sites if s.row.calls), lambda s: s.row.implementation):
        planned = group[0].record.planned
        for note in planned.decision.semantic_notes:
            if allowed(note.name):
                continue
            findings.append(
                _finding(
                    group,
                    all_us,
                    "semantic-change",
                    GateClass.SEMANTIC,
                    severity=Severity.ERROR,
                    title=f"{planned.choice.name}: {note.text}",
                    evidence=[
                        Evidence(what=note.name, required="as the request says", found=note.text)
                    ],
                    remedy="choose an implementation without the note, or accept it by name "
                    f'(engine.allow_semantics = ["{note.name}"])',
                    waiver=planned.waiver,
                )
            )
    return findings


def leaf_findings(sites: Sequence[SeenSite], all_us: float) -> list[Finding]:
    """Calls that ended in another leaf than is declared, and leaves that nothing shows."""
    called = [s for s in sites if s.record.num_watched]
    findings = []
    for group in _grouped(called, _leaf_key):
        leaf = group[0].row.leaf
        if leaf.state == "seen":
            continue
        is_other = leaf.state == "other"
        name = group[0].row.implementation
        what = "ends elsewhere" if is_other else "its leaf was not seen"
        findings.append(
            _finding(
                group,
                all_us,
                "leaf-mismatch" if is_other else "leaf-not-observed",
                GateClass.LEAF_MISMATCH if is_other else GateClass.UNVERIFIED,
                severity=Severity.ERROR if is_other else Severity.NOTE,
                title=f"{name}: {what}: {leaf.proof}",
                evidence=[
                    Evidence(
                        what="leaf",
                        required=" and ".join(leaf.declared) or "a declared leaf",
                        found=_found(group),
                    )
                ],
                remedy="see which arguments make the wrapper branch, and refuse them in "
                "not_supported_reasons"
                if is_other
                else "have the binding report its machine code (hal.loaded_code), or declare a "
                "leaf that can be seen",
            )
        )
    return findings


def _leaf_key(seen: SeenSite) -> object:
    ended = tuple(sorted(seen.record.tally.mismatches))
    return (seen.row.implementation, seen.row.leaf.state, ended)


def _found(sites: Sequence[SeenSite]) -> str:
    ended: dict[str, int] = {}
    for seen in sites:
        for mismatch in seen.record.tally.mismatches.values():
            ended[mismatch.ended_in] = ended.get(mismatch.ended_in, 0) + mismatch.calls
    if not ended:
        return "nothing that can be seen"
    return "; ".join(f"{name} ({calls} calls)" for name, calls in ended.items())


def never_exercised(sites: Sequence[SeenSite], load: Load) -> list[Finding]:
    """Planned, and the load did not get there."""
    idle = [s for s in sites if not s.row.calls and not s.record.num_watched]
    findings = []
    for group in _grouped(idle, lambda s: s.row.implementation):
        planned = group[0].record.planned
        why = load.unreachable.get((what_is_counted(planned), planned.tokens))
        findings.append(
            _finding(
                group,
                0.0,
                "never-exercised",
                GateClass.UNVERIFIED,
                severity=Severity.NOTE if why else Severity.WARNING,
                title=f"{planned.choice.name} for {planned.tokens} tokens was never called",
                evidence=[
                    Evidence(
                        what="calls of this range",
                        required="at least 1",
                        found=f"0: {why or 'the load did not reach it'}",
                    )
                ],
                remedy="narrow the limits that the plan is made for"
                if why
                else "give prompts that reach it (--prompts)",
            )
        )
    return findings


def host_findings(
    sites: Sequence[SeenSite], outside: Sequence[OutsideOp], all_us: float
) -> list[Finding]:
    """Reads by the host and copies between devices inside the model's forward."""
    findings = []
    busy = [s for s in sites if s.record.host_ops]
    for group in _grouped(busy, lambda s: tuple(s.record.host_ops)):
        (name, location), _ = next(iter(group[0].record.host_ops.items()))
        calls = sum(s.record.host_ops.total() for s in group)
        findings.append(
            _finding(
                group,
                all_us,
                "host-op-in-call",
                GateClass.LOST_FAST_PATH,
                severity=Severity.ERROR,
                title=f"{group[0].row.implementation} makes the host wait inside its call: {name}",
                location=location,
                evidence=[Evidence(what=name, required="0 calls", found=f"{calls} calls")],
                remedy="keep the value on the device, or compute it once when binding",
            )
        )
    for seen in outside:
        if seen.is_host and seen.in_forward:
            findings.append(_outside_finding(seen, all_us, "host-op-in-step"))
    return findings


def unrouted(outside: Sequence[OutsideOp], all_us: float) -> list[Finding]:
    """Products, attentions, collectives and gathers that no bound op contains."""
    return [_outside_finding(seen, all_us, "unrouted") for seen in outside if seen.is_product]


def _outside_finding(seen: OutsideOp, all_us: float, rule: str) -> Finding:
    is_host = rule == "host-op-in-step"
    us = seen.ns / 1e3
    return Finding(
        rule=rule,
        gate=GateClass.LOST_FAST_PATH if is_host else GateClass.UNROUTED,
        severity=Severity.ERROR,
        title=f"{seen.name} "
        + ("makes the host wait inside a step" if is_host else "runs outside every bound op"),
        op=seen.name,
        location=seen.location,
        evidence=(Evidence(what="calls", required="0", found=f"{seen.calls}"),),
        remedy="keep the value on the device"
        if is_host
        else "make it a call site of the plan (models/sites.py) and bind it",
        calls=seen.calls,
        time_us=round(us, 3),
        time_share=_share(us, all_us),
        cost_us=round(us, 3) if is_host else None,
    )


def number_findings(inspector: Inspector) -> list[Finding]:
    """The first call that diverges from the reference, and the first result that is not finite:
    what comes after follows from it. Other implementations have their own first."""
    findings = []
    for rule, items in (
        ("diverges-from-reference", inspector.divergences),
        ("non-finite-result", inspector.non_finite),
    ):
        firsts: dict[str, Divergence | NonFinite] = {}
        counts: dict[str, int] = {}
        for item in items:
            firsts.setdefault(item.implementation, item)
            counts[item.implementation] = counts.get(item.implementation, 0) + 1
        findings += [_number_finding(rule, f, counts[name]) for name, f in firsts.items()]
    return findings


def _number_finding(rule: str, first: Divergence | NonFinite, calls: int) -> Finding:
    if isinstance(first, Divergence):
        title = f"{first.implementation} is not what the reference computes: {first.text}"
        evidence = Evidence(
            what="error over tolerance", required="at most 1", found=f"{first.ratio:.4g}"
        )
    else:
        title = f"{first.implementation}: {first.text}"
        evidence = Evidence(what="result", required="finite numbers", found=first.text)
    return Finding(
        rule=rule,
        gate=GateClass.SEMANTIC,
        severity=Severity.ERROR,
        title=title,
        op=first.op,
        site=first.site,
        evidence=(evidence,),
        remedy="report it to who offers it; choose another with --use meanwhile",
        calls=calls,
    )


def counter_findings(sites: Sequence[SeenSite], counts: dict[int, int]) -> list[Finding]:
    """Counters that disagree with the calls that were observed. counts: by id of the record."""
    findings = []
    for seen in sites:
        observed = seen.record.num_timed + seen.record.num_watched
        counted = counts[id(seen.record)]
        if counted != observed:
            findings.append(
                Finding(
                    rule="counters-disagree",
                    gate=GateClass.LEAF_MISMATCH,
                    severity=Severity.ERROR,
                    title="the counted calls are not those that the implementation got",
                    op=seen.row.op,
                    site=seen.record.site,
                    evidence=(Evidence(what="calls", required=f"{observed}", found=f"{counted}"),),
                    calls=counted,
                )
            )
    return findings


def planned_ops(sites: Sequence[SeenSite]) -> list[PlannedOp]:
    """Each once, in order."""
    return list({id(s.record.planned): s.record.planned for s in sites}.values())
