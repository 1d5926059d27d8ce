"""What a rule of the audit is, and what it hands back: data about one loss, before merging."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hal.auditing.document import Evidence, Location
from hal.auditing.gates import GateClass, Severity
from hal.auditing.rules.trace_index import TraceIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One loss as a rule saw it. Hits of one rule at one line become one finding.

    op: op family, as `OpClass`. time_us: of the calls concerned. cost_us: at least so much would be
    saved, None where nobody can say. remedy, gate, severity: where they differ from the usual.
    """

    title: str
    location: Location | None = None
    op: str = ""
    evidence: tuple[Evidence, ...] = ()
    calls: int = 0
    time_us: float | None = None
    cost_us: float | None = None
    remedy: str = ""
    gate: GateClass | None = None
    severity: Severity | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to lose. summary: what it sees, one sentence. remedy: what to change.

    check: a pure function of the trace; it yields nothing for a program that loses nothing.
    """

    id: str
    gate: GateClass
    summary: str
    remedy: str
    check: Callable[[TraceIndex], Iterable[Hit]]


def evidence(what: str, required: object, found: object) -> Evidence:
    """An `Evidence` of anything that has a text."""
    return Evidence(what=what, required=str(required), found=str(found))
