"""A report as the comment of a pull request: the verdict, the findings, what changed. Short.

Code hosts take 65,536 characters. What does not fit is cut by whole findings, and said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from hal.auditing.document import AuditReport, Finding
from hal.auditing.finding_text import evidence_text, finding_cost
from hal.auditing.gate import fails_gate, gated_findings
from hal.auditing.gates import GateClass
from hal.auditing.markdown_text import markdown_code, markdown_text
from hal.auditing.quantities import format_share, format_time, plural
from hal.auditing.summary import coverage_shares, verdict

MAX_CHARACTERS: Final = 65_536
COMMENT_MARK: Final = "<!-- hal audit -->"
"""First line of the comment: by it a workflow finds the one to replace."""
_RESERVED = 400  # for the head of the table and the sentence about what was cut
_MAX_CELL = 400
_MAX_LINES = 12
_HEAD = ("", "class", "what", "where", "cost", "remedy")


def render_markdown(
    report: AuditReport,
    fail_on: frozenset[GateClass],
    previous: AuditReport | None = None,
) -> str:
    """The comment. `previous`: the report that it is compared with, of the main branch say."""
    is_failed = bool(gated_findings(report, fail_on))
    outcome = "failed" if is_failed else "passed" if fail_on else "report"
    head = [
        f"{COMMENT_MARK}\n### hal audit: {outcome}",
        verdict(report, fail_on),
        _facts(report),
    ]
    changes = "" if previous is None else _changes(report, previous)
    tail = [_waived(report), _coverage(report), _surroundings(report)]
    left = MAX_CHARACTERS - _size(*head) - _RESERVED
    kept = []
    for block in (changes, *tail):  # bounded each; together they leave half for the findings
        if block and _size(block) <= left // 2:
            kept.append(block)
            left -= _size(block)
    findings = _tables(report, fail_on, left)
    first = [changes] if changes in kept else []
    blocks = [*head, *first, *findings, *(block for block in kept if block != changes)]
    return "\n\n".join(blocks) + "\n"


def _size(*blocks: str) -> int:
    """In bytes of UTF-8, which are never fewer than the characters that a host counts."""
    return sum(len(block.encode()) + 2 for block in blocks)


def _facts(report: AuditReport) -> str:
    parts = [f"{markdown_code(report.subject, 200)} on {markdown_text(report.machine.label, 200)}"]
    if report.plan_hash:
        parts.append(f"plan {markdown_code(report.plan_hash, 40)}")
    if report.time_us:
        parts.append(f"{format_time(report.time_us)} observed")
    return f"{', '.join(parts)} ({report.mode} mode)"


def _tables(report: AuditReport, fail_on: frozenset[GateClass], left: int) -> Iterable[str]:
    """The findings as a table, as many as fit, those that fail the gate first."""
    gated = gated_findings(report, fail_on)
    findings = [*gated, *(f for f in report.open_findings() if not fails_gate(f, fail_on))]
    if not findings:
        return
    lines = [_row(_HEAD), _row("---" for _ in _HEAD)]
    for number, finding in enumerate(findings):
        line = _row(_cells(finding, fails_gate(finding, fail_on)))
        left -= _size(line)
        if left < 0:
            yield "\n".join(lines)
            rest = plural(len(findings) - number, "finding")
            yield f"…and {rest} more than this comment can hold: see the JSON report."
            return
        lines.append(line)
    yield "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(finding: Finding, is_gated: bool) -> Sequence[str]:
    facts = "; ".join(evidence_text(fact) for fact in finding.evidence[:3])
    what = f"{finding.title}: {facts}" if facts else finding.title
    op = f" ({markdown_text(finding.op, 80)})" if finding.op else ""
    return (
        "❌" if is_gated else {"error": "⚠️", "warning": "⚠️", "note": "ℹ️"}[finding.severity],
        finding.gate.value,
        markdown_text(what, _MAX_CELL),
        markdown_code(finding.where, 200) + op,
        markdown_text(", ".join(finding_cost(finding)), 120),
        markdown_text(finding.remedy, _MAX_CELL),
    )


def _changes(report: AuditReport, previous: AuditReport) -> str:
    """What is new and what is gone against an older report, by fingerprint."""
    new = Counter(f.fingerprint for f in report.open_findings())
    old = Counter(f.fingerprint for f in previous.open_findings())
    appeared = _picked(report, new - old)
    vanished = _picked(previous, old - new)
    lines = [
        f"Against the earlier report: {plural(len(appeared), 'new finding')}, "
        f"{len(vanished)} gone, {sum((new & old).values())} as before."
    ]
    lines += [f"- new: {_brief(finding)}" for finding in appeared[:_MAX_LINES]]
    lines += [f"- gone: {_brief(finding)}" for finding in vanished[:_MAX_LINES]]
    lines += [f"- {text}" for text in _tier_changes(report, previous)]
    cut = sum(max(0, len(part) - _MAX_LINES) for part in (appeared, vanished))
    lines += [f"- …and {cut} more"] if cut else []
    return lines[0] if len(lines) == 1 else f"{lines[0]}\n\n" + "\n".join(lines[1:])


def _picked(report: AuditReport, counts: Counter[str]) -> list[Finding]:
    left = Counter(counts)
    picked = []
    for finding in report.open_findings():
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
            picked.append(finding)
    return picked


def _brief(finding: Finding) -> str:
    place = f" at {markdown_code(finding.where, 120)}" if finding.where else ""
    return f"{finding.gate}: {markdown_text(finding.title, 200)}{place}"


def _tier_changes(report: AuditReport, previous: AuditReport) -> Iterable[str]:
    """Shares of the FLOPs by tier that moved by a percent or more."""
    new = {name: shares[0] or 0.0 for name, _, shares in coverage_shares(report)}
    old = {name: shares[0] or 0.0 for name, _, shares in coverage_shares(previous)}
    for name in dict.fromkeys([*new, *old]):
        before, after = old.get(name, 0.0), new.get(name, 0.0)
        if abs(after - before) >= 0.01:
            yield (
                f"work in {markdown_text(name, 40)}: "
                f"{format_share(before) or '0%'} → {format_share(after) or '0%'} of the FLOPs"
            )


def _waived(report: AuditReport) -> str:
    """Waivers and what became of them: none is hidden."""
    if not report.waivers:
        return ""
    lines = [
        f"- {use.state}: {markdown_text(use.text, 300)} ({plural(use.calls, 'call')})"
        for use in report.waivers[:_MAX_LINES]
    ]
    if len(report.waivers) > _MAX_LINES:
        lines.append(f"- …and {len(report.waivers) - _MAX_LINES} more")
    num_waived = sum(finding.waiver is not None for finding in report.findings)
    return f"Waivers ({plural(num_waived, 'finding')} allowed):\n\n" + "\n".join(lines)


def _coverage(report: AuditReport) -> str:
    shares = [
        f"{markdown_text(name, 40)} {format_share(flops)}"
        for name, _, (flops, _, _) in coverage_shares(report)[:_MAX_LINES]
        if flops
    ]
    return f"Work by tier (FLOPs): {', '.join(shares)}." if shares else ""


def _surroundings(report: AuditReport) -> str:
    """Variables that slow it down, and refusals that were swallowed."""
    lines = [
        f"- {markdown_code(f'{v.name}={v.value}', 120)}: {markdown_text(v.effect, 200)}"
        for v in report.variables
        if v.is_slow
    ]
    lines += [
        f"- swallowed refusal: {markdown_text(r.who, 200)}"
        + ("" if r.location is None else f" at {markdown_code(str(r.location), 120)}")
        for r in report.refusals
        if r.is_swallowed
    ]
    return "\n".join(lines[: 2 * _MAX_LINES])
