"""What of a large report a page has: the rows and findings that matter, and the rest in sums.

A page of every row of a large program is fifty megabytes, which no browser filters. Up to
`MAX_ROWS` rows a page has all. Beyond, half of them are what lost most time, the others what took
most; the rest becomes a row for each place, op and implementation, as fine as fits. Sums of calls,
work and time stay those of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hal.auditing.document import AuditReport, LeafCheck, Location, Row
from hal.auditing.html.places import group_place, layers_text
from hal.auditing.html.quantities import total
from hal.auditing.html.tier_marks import is_loss, row_mark
from hal.auditing.quantities import plural

MAX_ROWS: Final = 1000
"""Rows of a page, sums included."""
MAX_SUMS: Final = 250
"""Of them, rows that are sums of others."""
MAX_FINDINGS: Final = 300
"""Findings of the report inside a page."""


@dataclass(frozen=True, slots=True)
class Condensed:
    """report: what is inside the page. sources: for each of its rows the numbers of the report's
    rows that it is of, one for a row as it was. num_summed: rows that are in sums only.
    num_findings: that were left out."""

    report: AuditReport
    sources: tuple[tuple[int, ...], ...]
    num_summed: int
    num_findings: int

    @property
    def note(self) -> str:
        """What is left out, for readers; "" for nothing."""
        num_sums = sum(len(numbers) > 1 for numbers in self.sources)
        rows = (
            f"{plural(self.num_summed, 'row')} of {sum(map(len, self.sources)):,} took less time "
            f"and are summed in {num_sums:,} here"
        )
        findings = f"{plural(self.num_findings, 'finding')} that cost less left out"
        parts = [rows] * bool(self.num_summed) + [findings] * bool(self.num_findings)
        return f"{'; '.join(parts)}: the report as JSON (--json) has everything." if parts else ""


def condensed(report: AuditReport) -> Condensed:
    """The report that a page has inside; the same where it is small enough."""
    rows = report.rows
    num_findings = max(0, len(report.findings) - MAX_FINDINGS)
    kept = range(len(rows)) if len(rows) <= MAX_ROWS else _kept(rows, MAX_ROWS - MAX_SUMS)
    rest = sorted(set(range(len(rows))) - set(kept))
    sums = _sums(rows, rest)
    sources = [(number,) for number in kept] + sums
    found = Condensed(
        report=report,
        sources=tuple(sources),
        num_summed=sum(len(numbers) for numbers in sums if len(numbers) > 1),
        num_findings=num_findings,
    )
    if not found.note:
        return found
    waived = [finding for finding in report.findings if finding.waiver is not None]
    smaller = report.model_copy(
        update={
            "rows": tuple(_summed([rows[n] for n in numbers]) for numbers in sources),
            "findings": (*report.open_findings(), *waived)[:MAX_FINDINGS],
            "notes": (*report.notes, found.note),
        }
    )
    return Condensed(smaller, found.sources, found.num_summed, num_findings)


def _kept(rows: Sequence[Row], most: int) -> list[int]:
    """Numbers of the rows that stay as they are, in the report's order."""

    def weight(number: int) -> tuple[float, int]:
        return -(rows[number].time_us or 0.0), -rows[number].calls

    by_weight = sorted(range(len(rows)), key=weight)
    losses = [number for number in by_weight if is_loss(rows[number])][: most // 2]
    chosen = dict.fromkeys((*losses, *by_weight))
    return sorted(list(chosen)[:most])


def _sums(rows: Sequence[Row], numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The rows of these numbers in groups, by the finest key of which there are few enough."""
    groups: dict[object, list[int]] = {}
    for key_of in _KEYS:
        groups = {}
        for number in numbers:
            groups.setdefault(key_of(rows[number]), []).append(number)
        if len(groups) <= MAX_SUMS:
            break
    return [tuple(found) for found in groups.values()]


def _outcome(row: Row) -> tuple[object, ...]:
    return row_mark(row).name, row.leaf.state, is_loss(row)


_KEYS: Final[tuple[Callable[[Row], object], ...]] = (
    lambda row: (row.op, row.phase, group_place(row), row.implementation, _outcome(row)),
    lambda row: (row.op, row.phase, _wide_place(row), row.implementation, _outcome(row)),
    lambda row: (row.op, row.phase, row.implementation, _outcome(row)),
    lambda row: (row.op, _outcome(row)),
    _outcome,  # a few dozen at most, whatever the names
)


def _wide_place(row: Row) -> str:
    """The call site without its layer; of a program the file."""
    return group_place(row) if row.site or row.location is None else row.location.file


def _summed(rows: Sequence[Row]) -> Row:
    """One row of several; of one, that row."""
    first = rows[0]
    if len(rows) == 1:
        return first
    layers = layers_text(row.layer for row in rows if row.layer is not None)
    arguments = f"{plural(len(rows), 'row')} together{f', {layers}' if layers else ''}"
    bounds = [row.bound_us for row in rows if row.calls]
    is_bounded = all(bound is not None for bound in bounds)
    return Row(
        op=_one(row.op for row in rows) or "several ops",
        phase=_one(row.phase for row in rows) or "any",
        site=_one(group_place(row) for row in rows) or "" if first.site else "",
        arguments=arguments,
        implementation=_one(row.implementation for row in rows)
        or f"{plural(len({row.implementation for row in rows}), 'implementation')}",
        tier=first.tier,
        state=first.state,
        calls=sum(row.calls for row in rows),
        flops=sum(row.flops for row in rows),
        bytes=sum(row.bytes for row in rows),
        time_us=total(row.time_us for row in rows),
        bound_us=total(bounds) if is_bounded else None,
        bound_by=_one(row.bound_by or "" for row in rows) or None,
        leaf=LeafCheck(state=first.leaf.state, declared=first.leaf.declared),
        losers=first.losers,
        location=_location(rows),
    )


def _location(rows: Sequence[Row]) -> Location | None:
    """The file that all are in, without a line."""
    file = _one("" if row.location is None else row.location.file for row in rows)
    if not file:
        return None
    function = _one("" if row.location is None else row.location.function for row in rows)
    return Location(file=file, line=0, function=function)


def _one(texts: Iterable[str]) -> str:
    """The text that all of them are, "" if they differ."""
    distinct = set(texts)
    return distinct.pop() if len(distinct) == 1 else ""
