"""Whether the totals of a report hold what its rows say: one that was edited, or cut, does not.

What is checked holds for every report of an audit: rows are parts of the work that `coverage` sums,
and of the observed time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from hal.auditing.document import AuditReport, Row, Work
from hal.auditing.quantities import format_count, format_time

_ROUNDING: Final = 1e-6
_ROUNDING_US: Final = 0.01
"""Times are rounded to a thousandth of a µs, one by one."""


class TotalsProblem(NamedTuple):
    """key: as in the document, "rows[3].tokens"."""

    key: str
    required: str
    found: str


def totals_problem(report: AuditReport) -> TotalsProblem | None:
    """The first thing that cannot be true of one audit; None where all is well."""
    return next(_problems(report), None)


def _problems(report: AuditReport) -> Iterator[TotalsProblem]:
    for index, row in enumerate(report.rows):
        yield from _row_problems(f"rows[{index}]", row, report.time_us)
    yield from _coverage_problems(report)
    if report.time_us is None:
        return
    for name, times in (("rows", report.rows), ("coverage", tuple(report.coverage.values()))):
        found = sum(part.time_us or 0.0 for part in times)
        if _is_more(found, report.time_us):
            required = f"at least the time of {name}, {format_time(found)}"
            yield TotalsProblem("time_us", required, format_time(report.time_us))


def _row_problems(key: str, row: Row, whole_us: float | None) -> Iterator[TotalsProblem]:
    if row.tokens is not None and row.tokens[0] > row.tokens[1]:
        yield TotalsProblem(f"{key}.tokens", "a range, the lower end first", str(list(row.tokens)))
    if row.state == "never-exercised" and row.calls:
        yield TotalsProblem(f"{key}.calls", "0, since it was never exercised", str(row.calls))
    if whole_us is not None and _is_more(row.time_us or 0.0, whole_us):
        required = f"at most the observed time, {format_time(whole_us)}"
        yield TotalsProblem(f"{key}.time_us", required, format_time(row.time_us))


def _coverage_problems(report: AuditReport) -> Iterator[TotalsProblem]:
    if not report.coverage:
        return
    works: tuple[Work, ...] = tuple(report.coverage.values())
    calls = sum(row.calls for row in report.rows), sum(work.calls for work in works)
    if calls[0] > calls[1]:
        required = f"at least the calls of the rows, {format_count(calls[0])}"
        yield TotalsProblem("coverage", required, format_count(calls[1]))
    for name in ("flops", "bytes"):
        rows = sum(getattr(row, name) for row in report.rows if row.calls)
        total = sum(getattr(work, name) for work in works)
        if _is_more(rows, total):
            yield TotalsProblem(
                "coverage", f"at least the {name} of the rows, {rows:g}", f"{total:g}"
            )


def _is_more(part: float, whole: float) -> bool:
    return part > whole * (1 + _ROUNDING) + _ROUNDING_US
