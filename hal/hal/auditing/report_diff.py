"""What changed between two audit reports: other implementations, new and gone findings, variables.

Observed times disperse, so the same implementation counts as slower or faster only from a factor
of two, and where it takes a percent of the time or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from hal.auditing.changes import Change, ChangeKind, Diff, key_changes, sorted_changes
from hal.auditing.document import AuditReport, Finding, Row
from hal.auditing.gates import GateClass
from hal.auditing.quantities import format_time
from hal.auditing.summary import observed_time_us, op_label
from hal.tiers import Tier

NOISE: Final = 2.0
MIN_SHARE: Final = 0.01
_KINDS: Final[Mapping[GateClass, ChangeKind]] = {
    GateClass.LOST_FAST_PATH: ChangeKind.SLOWER,
    GateClass.UNROUTED: ChangeKind.SLOWER,
    GateClass.LEAF_MISMATCH: ChangeKind.SLOWER,
    GateClass.SEMANTIC: ChangeKind.SEMANTICS,
    GateClass.IGNORED_SETTING: ChangeKind.ENVIRONMENT,
    GateClass.UNVERIFIED: ChangeKind.REASONS,
    GateClass.ADVICE: ChangeKind.REASONS,
}
_Place = tuple[str, str, str, str]
Totals = tuple[float | None, float | None]  # observed time of the old and the new report, in µs


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


def _place(row: Row) -> _Place:
    """What a row is of, whatever served it; lines may move, functions stay."""
    place = row.site
    if not place and row.location is not None:
        place = f"{row.location.file} {row.location.function}".strip()
    return op_label(row), place, str(row.tokens or ""), row.arguments


def _row_changes(old: AuditReport, new: AuditReport) -> Iterator[Change]:
    before, after = _rows(old), _rows(new)
    totals = observed_time_us(old), observed_time_us(new)
    for place in {**before, **after}:
        label, where = place[0], (place[1],) if place[1] else ()
        if place not in after:
            yield Change(
                kind=ChangeKind.SITE_REMOVED, what=label, old=_names(before[place]), where=where
            )
        elif place not in before:
            yield Change(
                kind=ChangeKind.SITE_ADDED, what=label, new=_names(after[place]), where=where
            )
        else:
            yield from _served_changes(label, where, before[place], after[place], totals)


def _rows(report: AuditReport) -> dict[_Place, list[Row]]:
    found: dict[_Place, list[Row]] = {}
    for row in report.rows:
        if row.calls or row.state == "planned":
            found.setdefault(_place(row), []).append(row)
    return found


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(
        dict.fromkeys(
            row.implementation if row.tier == "unknown" else f"{row.implementation} ({row.tier})"
            for row in rows
        )
    )


def _served_changes(
    label: str, where: tuple[str, ...], old: list[Row], new: list[Row], totals: Totals
) -> Iterator[Change]:
    one, other = _time_of_call(old), _time_of_call(new)
    share = max(_share(rows, total) for rows, total in zip((old, new), totals, strict=True))
    is_same = {row.implementation for row in old} == {row.implementation for row in new}
    kind, detail = None, ""
    before, after = _worst_tier(old), _worst_tier(new)
    if before is not None and after is not None and before is not after:
        kind = ChangeKind.FASTER if after > before else ChangeKind.SLOWER
        detail = f"tier {before.label} → {after.label}"
    elif one and other and not 1 / NOISE <= other / one <= NOISE and share >= MIN_SHARE:
        kind = ChangeKind.FASTER if other < one else ChangeKind.SLOWER
        detail = f"observed {format_time(one)} → {format_time(other)} a call"
    if kind is None and not is_same:
        kind, detail = ChangeKind.IMPLEMENTATION, "nothing observed tells them apart"
    if kind is not None:
        yield Change(
            kind=kind, what=label, old=_names(old), new=_names(new), where=where, detail=detail
        )


def _share(rows: list[Row], total: float | None) -> float:
    return sum(row.time_us or 0.0 for row in rows) / total if total else 1.0


def _time_of_call(rows: list[Row]) -> float | None:
    calls = sum(row.calls for row in rows if row.time_us is not None)
    return sum(row.time_us or 0.0 for row in rows) / calls if calls else None


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
