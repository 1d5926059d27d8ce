"""Where the time and the work went: by op, by place and implementation, by tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hal.auditing.document import AuditReport, Row, Work
from hal.auditing.html.places import group_place, layers_text
from hal.auditing.html.quantities import count, duration, quantity, share, total
from hal.auditing.html.tier_marks import MARK_OF, TierMark, mark_name, row_mark

NUM_FIRST: Final = 14
"""Groups that are shown at once; the others are behind a click."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar. start, width: in percent of the bar."""

    start: float
    width: float
    mark: TierMark
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class OpGroup:
    """All rows of one op at one place, its layers together, that one implementation served.

    width: in percent of the longest. achieved: roofline time over time, of those rows that have
    both.
    """

    op: str
    place: str
    layers: str
    phase: str
    implementation: str
    mark: TierMark
    calls: int
    time_us: float | None
    share: float | None
    width: float
    achieved: float | None
    bound_by: str
    num_losers: int


def group_rows(rows: Iterable[Row]) -> dict[tuple[str, str, str, str, str], list[Row]]:
    """Rows by (op, place without layer, phase, implementation, mark), in order of appearance."""
    groups: dict[tuple[str, str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (row.op, group_place(row), row.phase, row.implementation, row_mark(row).name)
        groups.setdefault(key, []).append(row)
    return groups


def op_groups(report: AuditReport, whole_us: float | None) -> list[OpGroup]:
    """The groups that ran, those with most time first; where no time is known, most calls."""
    ran = [rows for rows in group_rows(report.rows).values() if any(row.calls for row in rows)]
    times = [total(row.time_us for row in rows) for rows in ran]
    longest = max((time for time in times if time), default=0.0)
    groups = [_group(rows, time, whole_us, longest) for rows, time in zip(ran, times, strict=True)]
    return sorted(groups, key=lambda group: (-(group.time_us or 0.0), -group.calls))


def _group(
    rows: Sequence[Row], time_us: float | None, whole_us: float | None, longest: float
) -> OpGroup:
    first = rows[0]
    return OpGroup(
        op=first.op,
        place=group_place(first),
        layers=layers_text(row.layer for row in rows if row.layer is not None),
        phase="" if first.phase == "any" else first.phase,
        implementation=first.implementation,
        mark=row_mark(first),
        calls=sum(row.calls for row in rows),
        time_us=time_us,
        share=time_us / whole_us if time_us is not None and whole_us else None,
        width=100 * (time_us or 0.0) / longest if longest else 0.0,
        achieved=achieved_of(rows),
        bound_by=" or ".join(sorted({row.bound_by for row in rows if row.bound_by})),
        num_losers=len({loser.name for row in rows for loser in row.losers}),
    )


def achieved_of(rows: Iterable[Row]) -> float | None:
    """Roofline time over observed time of the rows that have both."""
    both = [(row.bound_us, row.time_us) for row in rows if row.bound_us is not None and row.time_us]
    time_us = sum(time for _, time in both)
    return sum(bound for bound, _ in both) / time_us if time_us else None


def op_segments(report: AuditReport, whole_us: float | None) -> tuple[Segment, ...]:
    """Time by op, within an op by tier; what no row accounts for stays empty at the end."""
    times: dict[str, dict[str, float]] = {}
    for row in report.rows:
        if row.time_us:
            tiers = times.setdefault(row.op, {})
            name = row_mark(row).name
            tiers[name] = tiers.get(name, 0.0) + row.time_us
    parts = [
        (op, tier, time)
        for op, tiers in sorted(times.items(), key=lambda item: -sum(item[1].values()))
        for tier, time in sorted(tiers.items(), key=lambda item: -MARK_OF[item[0]].rank)
    ]
    # Rows of several threads can sum to more than the observed time.
    whole = max(whole_us or 0.0, sum(time for _, _, time in parts))
    return _stacked(
        [
            (time, tier, op, f"{op}, {tier}: {duration(time)}, {share(time / whole)}")
            for op, tier, time in parts
        ],
        whole,
    )


def _stacked(parts: Sequence[tuple[float, str, str, str]], whole: float) -> tuple[Segment, ...]:
    segments = []
    start = 0.0
    for value, tier, label, title in parts:
        width = 100 * value / whole
        segments.append(Segment(start, width, MARK_OF[tier], label, title))
        start += width
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of work as a stacked bar by tier. total: as text."""

    name: str
    total: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class TierWork:
    """A tier's work as texts, each with its share."""

    mark: TierMark
    name: str
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the work each tier did, by each measure that is known."""

    measures: tuple[Measure, ...]
    tiers: tuple[TierWork, ...]


_MEASURES: Final[tuple[tuple[str, Callable[[Work], float | None], Callable[[float], str]], ...]] = (
    ("time", lambda work: work.time_us, duration),
    ("FLOPs", lambda work: work.flops, lambda value: quantity(value, "FLOP")),
    ("bytes", lambda work: work.bytes, lambda value: quantity(value, "B")),
    ("calls", lambda work: work.calls, lambda value: count(int(value))),
)


def coverage_of(report: AuditReport) -> Coverage | None:
    """Coverage by work as the report has it; from the rows where it has none."""
    works = report.coverage or _summed(report.rows)
    ordered = sorted(works.items(), key=lambda item: (-_rank(item[0]), item[0]))
    measures = []
    cells: dict[str, list[tuple[str, str]]] = {tier: [] for tier, _ in ordered}
    for name, value_of, text_of in _MEASURES:
        values = [(tier, value_of(work)) for tier, work in ordered]
        whole = sum(value for _, value in values if value)
        if not whole:
            continue
        parts = [
            (value, mark_name(tier), tier, f"{tier}: {text_of(value)}, {share(value / whole)}")
            for tier, value in values
            if value
        ]
        measures.append(Measure(name, text_of(whole), _stacked(parts, whole)))
        for tier, value in values:
            known = None if value is None else value / whole
            cells[tier].append((share(known), "–" if value is None else text_of(value)))
    if not measures:
        return None
    tiers = tuple(
        TierWork(MARK_OF[mark_name(tier)], tier, tuple(cells[tier])) for tier, _ in ordered
    )
    return Coverage(tuple(measures), tiers)


def _rank(tier: str) -> int:
    return MARK_OF[mark_name(tier)].rank


def _summed(rows: Iterable[Row]) -> Mapping[str, Work]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.calls:
            groups.setdefault(row_mark(row).name, []).append(row)
    return {
        name: Work(
            calls=sum(row.calls for row in found),
            flops=sum(row.flops for row in found),
            bytes=sum(row.bytes for row in found),
            time_us=total(row.time_us for row in found),
        )
        for name, found in groups.items()
    }
