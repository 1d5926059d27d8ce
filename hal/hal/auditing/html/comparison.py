"""Two reports beside each other: what is new, gone, changed, faster, slower since the previous one.

Which rows are the same, and which count as faster or slower, is `row_matching`'s decision; rows
that changed alike are one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hal.auditing.document import AuditReport, Row
from hal.auditing.html.finding_cards import FindingCard, gathered
from hal.auditing.html.losers import places_text
from hal.auditing.html.places import tokens_text
from hal.auditing.html.quantities import count, duration, share, total
from hal.auditing.html.tier_marks import TierMark, row_mark
from hal.auditing.row_matching import (
    RowPair,
    matched_rows,
    outcome_of,
    time_per_call,
    time_ratio,
)
from hal.auditing.summary import observed_time_us

ChangeKind = Literal["new", "gone", "changed", "slower", "faster"]
_KINDS: Final[tuple[ChangeKind, ...]] = ("changed", "slower", "faster", "new", "gone")


@dataclass(frozen=True, slots=True)
class RowChange:
    """Rows that changed alike. before, after: implementation, tier and what else differs; None
    where there is no row. ratio: time per call now over then; 2 is twice as slow. time_us: of all
    the rows now."""

    kind: ChangeKind
    op: str
    places: tuple[str, ...]
    phase: str
    tokens: str
    num_rows: int
    before: Side | None
    after: Side | None
    ratio: float | None
    time_us: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a change. facts: states, where they differ. per_call: time per call, as text."""

    implementation: str
    mark: TierMark
    facts: str
    per_call: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One value that differs between the reports as a whole."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that differs. num_same: rows that neither changed nor differ in time.
    is_comparable: same machine and mode, without which times say nothing."""

    facts: tuple[Fact, ...]
    new_findings: tuple[FindingCard, ...]
    gone_findings: tuple[FindingCard, ...]
    changes: tuple[RowChange, ...]
    num_same: int
    is_comparable: bool


def compare(report: AuditReport, previous: AuditReport) -> Comparison:
    """What changed from `previous` to `report`."""
    totals = observed_time_us(previous), observed_time_us(report)
    found: dict[tuple[object, ...], list[RowPair]] = {}
    num_same = 0
    for pair in matched_rows(previous.rows, report.rows, totals):
        kind = _kind(pair)
        if kind is None:
            num_same += 1
            continue
        first = pair.first
        served = (outcome_of(pair.old), outcome_of(pair.new))
        found.setdefault((kind, first.op, first.phase, first.tokens, served), []).append(pair)
    changes = [_change(shape[0], pairs) for shape, pairs in found.items()]
    changes.sort(key=lambda change: (_KINDS.index(change.kind), -abs((change.ratio or 1) - 1)))
    fresh, gone = _findings(report, previous)
    return Comparison(
        facts=tuple(_facts(report, previous)),
        new_findings=fresh,
        gone_findings=gone,
        changes=tuple(changes),
        num_same=num_same,
        is_comparable=report.machine.label == previous.machine.label
        and report.mode == previous.mode,
    )


def _kind(pair: RowPair) -> ChangeKind | None:
    if not pair.old:
        return "new"
    if not pair.new:
        return "gone"
    return "changed" if outcome_of(pair.old) != outcome_of(pair.new) else pair.direction


def _change(kind: object, pairs: Sequence[RowPair]) -> RowChange:
    old = [row for pair in pairs for row in pair.old]
    new = [row for pair in pairs for row in pair.new]
    first = (new or old)[0]
    before, after = _side(old), _side(new)
    if before and after and before.facts == after.facts:
        before, after = replace(before, facts=""), replace(after, facts="")
    return RowChange(
        kind=next(name for name in _KINDS if name == kind),
        op=first.op,
        places=places_text(new or old),
        phase="" if first.phase == "any" else first.phase,
        tokens=tokens_text(first.tokens),
        num_rows=len(pairs),
        before=before,
        after=after,
        ratio=time_ratio(old, new),
        time_us=total(row.time_us for row in new),
    )


def _side(rows: Sequence[Row]) -> Side | None:
    if not rows:
        return None
    worst = min(rows, key=lambda row: row_mark(row).rank)
    names = list(dict.fromkeys(row.implementation for row in rows))
    states = dict.fromkeys(row.state.replace("-", " ") for row in rows)
    leaves = dict.fromkeys(
        f"leaf {row.leaf.state.replace('-', ' ')}" for row in rows if row.leaf.declared
    )
    return Side(
        implementation=", ".join(names[:3]) + (f" +{len(names) - 3}" if len(names) > 3 else ""),
        mark=row_mark(worst),
        facts=", ".join((*states, *leaves)),
        per_call=duration(time_per_call(rows)),
    )


def _findings(
    report: AuditReport, previous: AuditReport
) -> tuple[tuple[FindingCard, ...], tuple[FindingCard, ...]]:
    """Open findings that only one of the reports has. A waiver that was added makes one gone."""
    now, then = report.open_findings(), previous.open_findings()
    known = {finding.fingerprint for finding in then}
    left = {finding.fingerprint for finding in now}
    return (
        tuple(gathered(f for f in now if f.fingerprint not in known)),
        tuple(gathered(f for f in then if f.fingerprint not in left)),
    )


def _facts(report: AuditReport, previous: AuditReport) -> Iterable[Fact]:
    pairs = [
        ("subject", previous.subject, report.subject),
        ("machine", previous.machine.label, report.machine.label),
        ("arch", previous.machine.arch, report.machine.arch),
        ("mode", previous.mode, report.mode),
        ("plan", previous.plan_hash or "none", report.plan_hash or "none"),
        ("processes", count(previous.processes), count(report.processes)),
    ]
    for name in sorted({*previous.versions, *report.versions}):
        old, new = previous.versions.get(name, "absent"), report.versions.get(name, "absent")
        pairs.append((f"version of {name}", old, new))
    was = {variable.name: variable.value for variable in previous.variables}
    now = {variable.name: variable.value for variable in report.variables}
    for name in sorted({*was, *now}):
        pairs.append((name, was.get(name, "not set"), now.get(name, "not set")))
    for name, old, new in pairs:
        if old != new:
            yield Fact(name, old or "–", new or "–")
    if previous.time_us and report.time_us and previous.time_us != report.time_us:
        yield Fact("observed time", duration(previous.time_us), duration(report.time_us))
    lost_before, lost_now = _lost_share(previous), _lost_share(report)
    if lost_before is not None and lost_now is not None and lost_before != lost_now:
        yield Fact("time below the tier tuned", share(lost_before), share(lost_now))


def _lost_share(report: AuditReport) -> float | None:
    """Share of the rows' time that tiers below tuned took."""
    whole = total(row.time_us for row in report.rows)
    if not whole:
        return None
    slow = ("portable", "reference", "host", "outside")
    return sum(row.time_us or 0.0 for row in report.rows if row_mark(row).name in slow) / whole


def counts_of(comparison: Comparison) -> list[tuple[str, int]]:
    """How many rows there are of each kind of change, kinds without rows left out."""
    return [
        (kind, number)
        for kind in _KINDS
        if (number := sum(c.num_rows for c in comparison.changes if c.kind == kind))
    ]
