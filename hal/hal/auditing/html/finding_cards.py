"""Findings as cards: the same finding in many layers is one card that lists where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hal.auditing.document import AuditReport, Evidence, Finding
from hal.auditing.gates import GateClass, Severity
from hal.auditing.html.places import layer_of, layers_text, site_pattern
from hal.auditing.html.quantities import total

SEVERITY_SIGNS: Final = {Severity.ERROR: "■", Severity.WARNING: "▲", Severity.NOTE: "●"}
_MAX_PLACES: Final = 40


@dataclass(frozen=True, slots=True)
class FindingCard:
    """Findings that differ only in place. anchor: id of the first card of its class, else "".
    width: time share in percent, for a bar."""

    rule: str
    gate: GateClass
    severity: Severity
    sign: str
    title: str
    op: str
    places: tuple[str, ...]
    num_hidden: int
    evidence: tuple[Evidence, ...]
    remedy: str
    calls: int
    time_us: float | None
    time_share: float | None
    cost_us: float | None
    width: float
    waiver: str | None
    ranks: tuple[int, ...]
    count: int
    anchor: str = ""


def open_cards(report: AuditReport) -> tuple[FindingCard, ...]:
    """What no waiver allows, worst first, the first of each class with an anchor."""
    cards = gathered(report.open_findings())
    seen: set[GateClass] = set()
    anchored = []
    for card in cards:
        anchor = "" if card.gate in seen else f"finding-{card.gate.value}"
        seen.add(card.gate)
        anchored.append(replace(card, anchor=anchor))
    return tuple(anchored)


def waived_cards(report: AuditReport) -> tuple[FindingCard, ...]:
    """What a waiver allows."""
    return tuple(gathered([f for f in report.findings if f.waiver is not None]))


def gathered(findings: Iterable[Finding]) -> list[FindingCard]:
    """Cards in the order of the worst finding of each."""
    found: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key = (
            finding.rule,
            finding.gate,
            finding.severity,
            _title(finding),
            finding.op,
            finding.evidence,
            finding.remedy,
            finding.waiver,
        )
        found.setdefault(key, []).append(finding)
    return [_card(group) for group in found.values()]


def _title(finding: Finding) -> str:
    """The title without the layer, if it names its call site."""
    if not finding.site:
        return finding.title
    return finding.title.replace(finding.site, site_pattern(finding.site))


def _card(findings: Sequence[Finding]) -> FindingCard:
    first = findings[0]
    time_share = total(finding.time_share for finding in findings)
    places = _places(findings)
    return FindingCard(
        rule=first.rule,
        gate=first.gate,
        severity=first.severity,
        sign=SEVERITY_SIGNS[first.severity],
        title=_title(first),
        op=first.op,
        places=places[:_MAX_PLACES],
        num_hidden=max(0, len(places) - _MAX_PLACES),
        evidence=first.evidence,
        remedy=first.remedy,
        calls=sum(finding.calls for finding in findings),
        time_us=total(finding.time_us for finding in findings),
        time_share=time_share,
        cost_us=total(finding.cost_us for finding in findings),
        width=min(100.0, 100 * (time_share or 0.0)),
        waiver=first.waiver,
        ranks=tuple(sorted({f.rank for f in findings if f.rank is not None})),
        count=len(findings),
    )


def _places(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Call sites with their layers, and source lines with their functions, each once."""
    layers: dict[str, list[int]] = {}
    for finding in findings:
        if finding.site:
            known = layers.setdefault(site_pattern(finding.site), [])
            layer = layer_of(finding.site)
            if layer is not None:
                known.append(layer)
        if finding.location is not None:
            function = finding.location.function
            layers.setdefault(f"{finding.location}{f' in {function}' if function else ''}", [])
    return tuple(
        f"{place} ({layers_text(found)})" if found else place for place, found in layers.items()
    )
