"""What changed between two audit reports: other implementations, new and gone findings, variables.

Which rows are the same, and which of them slower or faster, is `row_matching`'s decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from hal.auditing.changes import Change, ChangeKind, Diff, key_changes, sorted_changes
from hal.auditing.document import AuditReport, Finding, Row
from hal.auditing.gates import GateClass
from hal.auditing.quantities import format_time
from hal.auditing.row_matching import RowPair, matched_rows, time_per_call
from hal.auditing.summary import observed_time_us, op_label
from hal.tiers import Tier

_KINDS: Final[Mapping[GateClass, ChangeKind]] = {
    GateClass.LOST_FAST_PATH: ChangeKind.SLOWER,
    GateClass.UNROUTED: ChangeKind.SLOWER,
    GateClass.LEAF_MISMATCH: ChangeKind.SLOWER,
    GateClass.SEMANTIC: ChangeKind.SEMANTICS,
    GateClass.IGNORED_SETTING: ChangeKind.ENVIRONMENT,
    GateClass.UNVERIFIED: ChangeKind.REASONS,
    GateClass.ADVICE: ChangeKind.REASONS,
}


def diff_reports(old: AuditReport, new: AuditReport) -> Diff:
    """Two reports, of one subject as a rule."""
    changes = [
        *key_changes(ChangeKind.VERSION, old.versions, new.versions),
        *key_changes(ChangeKind.ENVIRONMENT, _environment(old), _environment(new)),
        *_machine_changes(old, new),
        *_waiver_changes(old, new),
        *_row_changes(old, new),
        *_finding_changes(old, new),
    ]
    if old.subject != new.subject:
        changes.append(
            Change(kind=ChangeKind.MODEL, what="subject", old=old.subject, new=new.subject)
        )
    return Diff(
        subject="report",
        old=old.plan_hash or old.created,
        new=new.plan_hash or new.created,
        changes=sorted_changes(changes),
    )


def _environment(report: AuditReport) -> dict[str, str]:
    return {variable.name: variable.value for variable in report.variables}


def _machine_changes(old: AuditReport, new: AuditReport) -> Iterator[Change]:
    before, after = old.machine, new.machine
    for what, one, other in (
        ("device", before.label, after.label),
        ("device id", before.device_id, after.device_id),
        ("architecture", before.arch, after.arch),
        ("processes", str(old.processes), str(new.processes)),
    ):
        if one != other:
            yield Change(kind=ChangeKind.DEVICE, what=what, old=one, new=other)


def _waiver_changes(old: AuditReport, new: AuditReport) -> Iterator[Change]:
    before = {use.text: use.state for use in old.waivers}
    after = {use.text: use.state for use in new.waivers}
    yield from key_changes(ChangeKind.SETTING, before, after, prefix="waiver ")


def _row_changes(old: AuditReport, new: AuditReport) -> Iterator[Change]:
    totals = observed_time_us(old), observed_time_us(new)
    for pair in matched_rows(_ran(old), _ran(new), totals):
        label, where = op_label(pair.first), (pair.place,) if pair.place else ()
        if not pair.new:
            yield Change(
                kind=ChangeKind.SITE_REMOVED, what=label, old=_names(pair.old), where=where
            )
        elif not pair.old:
            yield Change(kind=ChangeKind.SITE_ADDED, what=label, new=_names(pair.new), where=where)
        else:
            yield from _served_changes(label, where, pair)


def _ran(report: AuditReport) -> Iterator[Row]:
    return (row for row in report.rows if row.calls or row.state == "planned")


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(
        dict.fromkeys(
            row.implementation if row.tier == "unknown" else f"{row.implementation} ({row.tier})"
            for row in rows
        )
    )


def _served_changes(label: str, where: tuple[str, ...], pair: RowPair) -> Iterator[Change]:
    old, new = pair.old, pair.new
    is_same = {row.implementation for row in old} == {row.implementation for row in new}
    kind, detail = None, ""
    before, after = _worst_tier(old), _worst_tier(new)
    if before is not None and after is not None and before is not after:
        kind = ChangeKind.FASTER if after > before else ChangeKind.SLOWER
        detail = f"tier {before.label} → {after.label}"
    elif pair.direction is not None:
        kind = ChangeKind(pair.direction)
        one, other = (format_time(time_per_call(rows)) for rows in (old, new))
        detail = f"observed {one} → {other} a call"
    if kind is None and not is_same:
        kind, detail = ChangeKind.IMPLEMENTATION, "nothing observed tells them apart"
    if kind is not None:
        yield Change(
            kind=kind, what=label, old=_names(old), new=_names(new), where=where, detail=detail
        )


def _worst_tier(rows: list[Row]) -> Tier | None:
    """None where a row has a tier of no plan ("unknown")."""
    known = {tier.label: tier for tier in Tier}
    found = [known.get(row.tier) for row in rows]
    tiers = [tier for tier in found if tier is not None]
    return min(tiers) if len(tiers) == len(found) and tiers else None


def _finding_changes(old: AuditReport, new: AuditReport) -> Iterator[Change]:
    before = Counter(finding.fingerprint for finding in old.open_findings())
    after = Counter(finding.fingerprint for finding in new.open_findings())
    for finding in _picked(new, after - before):
        yield Change(
            kind=_KINDS[finding.gate],
            what=f"{finding.gate} {finding.rule}",
            new=finding.title,
            where=(finding.where,) if finding.where else (),
            detail="a new finding",
        )
    for finding in _picked(old, before - after):
        kind = _KINDS[finding.gate]
        yield Change(
            kind=ChangeKind.FASTER if kind is ChangeKind.SLOWER else kind,
            what=f"{finding.gate} {finding.rule}",
            old=finding.title,
            where=(finding.where,) if finding.where else (),
            detail="a finding that is gone",
        )


def _picked(report: AuditReport, counts: Counter[str]) -> Iterator[Finding]:
    left = Counter(counts)
    for finding in report.open_findings():
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
            yield finding
