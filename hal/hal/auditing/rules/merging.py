"""Turns what rules saw into findings: one per rule, gate class and line, with its share of time."""

from __future__ import annotations

from collections.abc import Iterable

from hal.auditing.document import Evidence, Finding
from hal.auditing.gates import GateClass, Severity
from hal.auditing.rules.rule import Hit, Rule
from hal.auditing.rules.trace_index import Place, place_of

ERROR_SHARE = 0.1
"""From this share of all observed time on a loss is an error, below it a warning."""
MAX_EVIDENCE = 12


def findings_of(rule: Rule, hits: Iterable[Hit], total_us: float) -> list[Finding]:
    """One finding per line and gate class, in the order in which they were seen."""
    groups: dict[tuple[Place, GateClass, str], list[Hit]] = {}
    for hit in hits:
        # What has no line is told apart by its title: two variables are two findings.
        name = hit.title if hit.location is None else ""
        key = (place_of(hit.location), hit.gate or rule.gate, name)
        groups.setdefault(key, []).append(hit)
    return [_merged(rule, key[1], group, total_us) for key, group in groups.items()]


def _merged(rule: Rule, gate: GateClass, hits: list[Hit], total_us: float) -> Finding:
    worst = max(hits, key=lambda hit: (hit.time_us or 0.0, hit.calls))
    times = [hit.time_us for hit in hits if hit.time_us is not None]
    costs = [hit.cost_us for hit in hits if hit.cost_us is not None]
    time_us = sum(times) if times else None
    share = min(1.0, time_us / total_us) if time_us is not None and total_us > 0 else None
    titles = {hit.title for hit in hits}
    ranks = {hit.rank for hit in hits}
    return Finding(
        rule=rule.id,
        gate=gate,
        severity=worst.severity or severity_of(gate, share),
        title=worst.title + (f" (and {len(titles) - 1} more like it)" if len(titles) > 1 else ""),
        op=worst.op,
        location=worst.location,
        evidence=_distinct([worst, *hits]),
        remedy=worst.remedy or rule.remedy,
        calls=sum(hit.calls for hit in hits),
        time_us=time_us,
        time_share=share,
        cost_us=sum(costs) if costs else None,
        rank=ranks.pop() if len(ranks) == 1 else None,
    )


def severity_of(gate: GateClass, share: float | None) -> Severity:
    """Advice is a note; other numbers than asked for, and what takes much time, are errors."""
    if gate is GateClass.ADVICE:
        return Severity.NOTE
    if gate is GateClass.SEMANTIC or (share is not None and share >= ERROR_SHARE):
        return Severity.ERROR
    return Severity.WARNING


def _distinct(hits: Iterable[Hit]) -> tuple[Evidence, ...]:
    seen = dict.fromkeys(item for hit in hits for item in hit.evidence)
    return tuple(seen)[:MAX_EVIDENCE]
