"""What the tables and the pull request's comment show of a report: rows of one op together, the
verdict in a sentence, the work by tier in shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from hal.auditing.document import AuditReport, Finding, Row
from hal.auditing.gate import gated_findings
from hal.auditing.gates import GATE_CLASSES, GateClass
from hal.auditing.quantities import plural
from hal.auditing.unobserved import NOTHING_OBSERVED


@dataclass(slots=True)
class RowGroup:
    """Rows with equal op, phase, implementation and tier, summed. Times in µs. is_bounded: every
    row that ran has a roofline time."""

    op: str
    implementation: str
    tier: str
    places: int = 0
    calls: int = 0
    time_us: float | None = None
    bound_us: float = 0.0
    is_bounded: bool = True
    never: int = 0

    @property
    def achieved(self) -> float | None:
        """Roofline time over observed time, of all the rows."""
        if not self.time_us or not self.is_bounded or not self.bound_us:
            return None
        return self.bound_us / self.time_us


def op_label(row: Row) -> str:
    """`attention.decode`; ops of every phase without one."""
    has_phase = row.phase not in ("", "any") and not row.op.endswith(f".{row.phase}")
    return f"{row.op}.{row.phase}" if has_phase else row.op


def row_groups(report: AuditReport) -> list[RowGroup]:
    """The rows by op and implementation: what took most time first, then what was called most."""
    groups: dict[tuple[str, str, str], RowGroup] = {}
    for row in report.rows:
        key = (op_label(row), row.implementation, row.tier)
        group = groups.setdefault(key, RowGroup(*key))
        group.places += 1
        group.calls += row.calls
        group.never += row.state == "never-exercised"
        if row.time_us is not None:
            group.time_us = (group.time_us or 0.0) + row.time_us
            group.bound_us += row.bound_us or 0.0
            group.is_bounded &= row.bound_us is not None or not row.calls
    return sorted(
        groups.values(), key=lambda g: (-(g.time_us or 0.0), -g.calls, g.op, g.implementation)
    )


def observed_time_us(report: AuditReport) -> float | None:
    """What shares are of: all observed time, or the sum of the rows where it is not known."""
    if report.time_us:
        return report.time_us
    times = [row.time_us for row in report.rows if row.time_us is not None]
    return sum(times) or None


def coverage_shares(report: AuditReport) -> list[tuple[str, int, tuple[float | None, ...]]]:
    """(tier or "outside" or "host", calls, shares of FLOPs, bytes, time), as the report has it."""
    works = report.coverage.values()
    flops = sum(work.flops for work in works)
    num_bytes = sum(work.bytes for work in works)
    time_us = sum(work.time_us or 0.0 for work in works)
    return [
        (
            name,
            work.calls,
            (
                work.flops / flops if flops else None,
                work.bytes / num_bytes if num_bytes else None,
                (work.time_us or 0.0) / time_us if time_us else None,
            ),
        )
        for name, work in report.coverage.items()
    ]


def count_by_class(findings: Iterable[Finding]) -> str:
    """`2 lost-fast-path, 1 unrouted`, in the order of the classes."""
    counts = Counter(finding.gate.value for finding in findings)
    order = (*GATE_CLASSES, GateClass.ADVICE.value)
    return ", ".join(f"{counts[gate]} {gate}" for gate in order if counts[gate])


def verdict(report: AuditReport, fail_on: frozenset[GateClass]) -> str:
    """The outcome in a sentence."""
    failing = gated_findings(report, fail_on)
    if any(finding.rule == NOTHING_OBSERVED for finding in failing):
        return "Failed: nothing was observed, so that nothing is proven (unverified)."
    if failing:
        return f"Failed: {count_by_class(failing)}."
    remaining = report.open_findings()
    rest = (
        f" {plural(len(remaining), 'finding')}: {count_by_class(remaining)}." if remaining else ""
    )
    if not fail_on:
        return f"No gate.{rest or ' Nothing was found.'}"
    classes = ", ".join(gate for gate in GATE_CLASSES if gate in fail_on)
    if not rest:
        return f"Passed: nothing was found (gate: {classes})."
    return f"Passed the gate ({classes}).{rest}"
