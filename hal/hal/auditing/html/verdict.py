"""The first thing that a reader sees: what is lost, and how far the rest can be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hal.auditing.document import AuditReport, Finding
from hal.auditing.gates import GateClass, Severity
from hal.auditing.html.quantities import count
from hal.auditing.html.tier_marks import row_mark
from hal.auditing.quantities import plural

GATE_TEXTS: Final[dict[GateClass, tuple[str, str, str]]] = {
    GateClass.LOST_FAST_PATH: (
        "lost fast path",
        "lost fast paths",
        "something slower ran than what the device has",
    ),
    GateClass.UNROUTED: ("unrouted call", "unrouted calls", "work outside every bound op"),
    GateClass.SEMANTIC: (
        "semantic change",
        "semantic changes",
        "other numbers than were asked for, beyond rounding",
    ),
    GateClass.LEAF_MISMATCH: (
        "leaf mismatch",
        "leaf mismatches",
        "the right wrapper, another kernel inside",
    ),
    GateClass.UNVERIFIED: ("unverified", "unverified", "nobody saw it run"),
    GateClass.IGNORED_SETTING: (
        "ignored setting",
        "ignored settings",
        "set and not obeyed, or decided from outside",
    ),
    GateClass.ADVICE: ("advice", "advice", "worth knowing; never fails a gate"),
}


@dataclass(frozen=True, slots=True)
class GateCount:
    """Findings of one class. num_open: those that no waiver allows."""

    gate: GateClass
    label: str
    meaning: str
    num_open: int
    num_waived: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """mood: "bad" (an open finding that is an error), "warn" (other open findings of a gate's
    class), "calm" (there is nothing to judge by), "good". cautions: why "good" is not proof."""

    mood: Literal["good", "warn", "bad", "calm"]
    title: str
    cautions: tuple[str, ...]
    gates: tuple[GateCount, ...]


def judge_report(report: AuditReport) -> Verdict:
    """The verdict of a report. It counts; which class fails a build is the gate's decision."""
    waiting = [f for f in report.findings if f.waiver is None]
    blocking = [f for f in waiting if f.gate is not GateClass.ADVICE]
    return Verdict(
        mood=_mood(report, blocking),
        title=_title(report, blocking),
        cautions=tuple(_cautions(report)),
        gates=_gate_counts(report),
    )


def _mood(
    report: AuditReport, blocking: Sequence[Finding]
) -> Literal["good", "warn", "bad", "calm"]:
    if any(finding.severity is Severity.ERROR for finding in blocking):
        return "bad"
    if blocking or any(refusal.is_swallowed for refusal in report.refusals):
        return "warn"
    return "good" if any(row.calls for row in report.rows) else "calm"


def _title(report: AuditReport, blocking: Sequence[Finding]) -> str:
    counts = Counter(finding.gate for finding in blocking)
    if counts:
        parts = [
            f"{count(counts[gate])} {texts[0 if counts[gate] == 1 else 1]}"
            for gate, texts in GATE_TEXTS.items()
            if counts[gate]
        ]
        return ", ".join(parts)
    if not any(row.calls for row in report.rows):
        return "Nothing was observed"
    return "No open finding" if _num_unknown(report) else "No fast path lost"


def _cautions(report: AuditReport) -> list[str]:
    cautions = []
    never = sum(row.state == "never-exercised" for row in report.rows)
    if never:
        cautions.append(f"{count(never)} of {plural(len(report.rows), 'row')} never exercised")
    blind = sum(row.leaf.state == "not-observed" for row in report.rows if row.calls)
    if blind:
        cautions.append(f"{plural(blind, 'row')} with a leaf that nothing here can see")
    unknown = _num_unknown(report)
    if unknown:
        cautions.append(f"{plural(unknown, 'row')} of a tier that nobody states")
    if report.mode == "light":
        cautions.append("light mode: counters and sampled steps, not every op")
    swallowed = sum(refusal.is_swallowed for refusal in report.refusals)
    if swallowed:
        cautions.append(f"{plural(swallowed, 'refusal')} swallowed by the program")
    waived = sum(finding.waiver is not None for finding in report.findings)
    if waived:
        cautions.append(f"{plural(waived, 'finding')} allowed by waivers")
    if not report.machine.is_measured and report.machine.peak_flops:
        cautions.append("the device's rates come from a database and were not measured here")
    return cautions


def _num_unknown(report: AuditReport) -> int:
    return sum(row_mark(row).name == "unknown" for row in report.rows if row.calls)


def _gate_counts(report: AuditReport) -> tuple[GateCount, ...]:
    waiting = Counter(f.gate for f in report.findings if f.waiver is None)
    waived = Counter(f.gate for f in report.findings if f.waiver is not None)
    return tuple(
        GateCount(
            gate, texts[0 if waiting[gate] == 1 else 1], texts[2], waiting[gate], waived[gate]
        )
        for gate, texts in GATE_TEXTS.items()
    )
