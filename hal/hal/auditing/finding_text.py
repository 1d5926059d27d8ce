"""A finding in words: its place, its cost, its evidence, and which of several say the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hal.auditing.document import Evidence, Finding
from hal.auditing.quantities import format_share, format_time, plural


def alike(findings: Sequence[Finding]) -> Iterable[list[Finding]]:
    """Findings that say the same of several lines of one function (keys and values) are one."""
    groups: dict[object, list[Finding]] = {}
    for number, finding in enumerate(findings):
        place = finding.location
        key: object = number
        if place is not None and place.function:
            what = (finding.rule, finding.gate, finding.severity, finding.title, finding.remedy)
            key = (*what, place.file, place.function, finding.rank)
        groups.setdefault(key, []).append(finding)
    return groups.values()


def where_words(finding: Finding) -> Iterable[str]:
    """Its line, its function, its op and its rank, as far as they are known."""
    if finding.where:
        yield finding.where
    if finding.location is not None and finding.location.function:
        yield f"in {finding.location.function}"
    if finding.op:
        yield f"({finding.op})"
    if finding.rank is not None:
        yield f"rank {finding.rank}"


def finding_cost(finding: Finding) -> list[str]:
    """What is known of the cost, in words."""
    parts = []
    if finding.cost_us is not None:
        parts.append(f"at least {format_time(finding.cost_us)} to gain")
    if finding.time_us is not None:
        share = "" if finding.time_share is None else f", {format_share(finding.time_share)} of all"
        parts.append(f"{format_time(finding.time_us)} observed{share}")
    if finding.calls:
        parts.append(plural(finding.calls, "call"))
    return parts


def evidence_text(fact: Evidence) -> str:
    """`head_dim: required at most 256, found 320`; only the latter where nothing is required."""
    if fact.required == "any":
        return f"{fact.what}: {fact.found}"
    return f"{fact.what}: required {fact.required}, found {fact.found}"
