"""Two reports beside each other: what is new, gone, changed, faster, slower since the previous one.

Rows are matched by op, place, phase, tokens and arguments, so that a row whose implementation
changed is one row that changed. What counts as faster or slower is `report_diff`'s decision; here a
layer's rows are judged together with those of the other layers.
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
from hal.auditing.report_diff import MIN_SHARE, NOISE
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


_Key = tuple[str, str, str, tuple[int, int] | None, str]


def compare(report: AuditReport, previous: AuditReport) -> Comparison:
    """What changed from `previous` to `report`."""
    before, after = _by_key(previous.rows), _by_key(report.rows)
    found: dict[tuple[object, ...], list[tuple[list[Row], list[Row]]]] = {}
    num_same = 0
    for key in dict.fromkeys((*after, *before)):
        old, new = before.get(key, []), after.get(key, [])
        kind = _kind(old, new)
        if kind is None:
            num_same += 1
            continue
        shape = (kind, key[0], key[2], key[3], _outcome(old), _outcome(new))
        found.setdefault(shape, []).append((old, new))
    changes = [_change(shape[0], pairs) for shape, pairs in found.items()]
    whole_us = observed_time_us(report)
    small = [change for change in changes if _is_noise(change, whole_us)]
    changes = [change for change in changes if change not in small]
    num_same += sum(change.num_rows for change in small)
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


def _is_noise(change: RowChange, whole_us: float | None) -> bool:
    """Slower in what takes next to no time."""
    if change.kind != "slower" or not whole_us:
        return False
    return (change.time_us or 0.0) / whole_us < MIN_SHARE


def _by_key(rows: Iterable[Row]) -> dict[_Key, list[Row]]:
    """Rows of one key are several implementations at one place, or lines of one function."""
    found: dict[_Key, list[Row]] = {}
    for row in rows:
        place = row.site
        if not place and row.location is not None:
            # Lines move when a file is edited; the function stays.
            place = f"{row.location.file}#{row.location.function or row.location.line}"
        key = (row.op, place, row.phase, row.tokens, row.arguments)
        found.setdefault(key, []).append(row)
    return found


def _kind(old: Sequence[Row], new: Sequence[Row]) -> ChangeKind | None:
    if not old:
        return "new"
    if not new:
        return "gone"
    if _outcome(old) != _outcome(new):
        return "changed"
    ratio = _ratio(old, new)
    if ratio is None or 1 / NOISE <= ratio <= NOISE:
        return None
    return "slower" if ratio > 1 else "faster"


def _outcome(rows: Sequence[Row]) -> tuple[tuple[str, str, str, str], ...]:
    """What of the rows is not a figure: a difference here is a change of what runs."""
    return tuple(
        sorted({(row.implementation, row.tier, row.state, row.leaf.state) for row in rows})
    )


def _per_call(rows: Iterable[Row]) -> float | None:
    timed = [(row.time_us, row.calls) for row in rows if row.time_us is not None and row.calls]
    calls = sum(number for _, number in timed)
    return sum(time for time, _ in timed) / calls if calls else None


def _ratio(old: Iterable[Row], new: Iterable[Row]) -> float | None:
    before, after = _per_call(old), _per_call(new)
    return after / before if before and after else None


def _change(kind: object, pairs: Sequence[tuple[list[Row], list[Row]]]) -> RowChange:
    old = [row for rows, _ in pairs for row in rows]
    new = [row for _, rows in pairs for row in rows]
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
        ratio=_ratio(old, new),
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
        per_call=duration(_per_call(rows)),
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
