"""Findings on a terminal: what is wrong, where, what it costs, how it is known, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from hal.auditing.document import AuditReport, Finding
from hal.auditing.finding_text import alike, evidence_text, finding_cost, where_words
from hal.auditing.gate import fails_gate
from hal.auditing.gates import GateClass, Severity
from hal.auditing.terminal_layout import one_line, print_field, say_more

MAX_FINDINGS: Final = 25
_MAX_EVIDENCE = 6
_SEVERITY_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.NOTE: "bold blue",
}


def print_findings(report: AuditReport, fail_on: frozenset[GateClass], console: Console) -> None:
    """Those that no waiver allows, worst first; then the others in a line each."""
    remaining = report.open_findings()
    waived = [finding for finding in report.findings if finding.waiver is not None]
    groups = list(alike(remaining))
    for group in groups[:MAX_FINDINGS]:
        _print_finding(group, fails_gate(group[0], fail_on), console)
    say_more(console, sum(len(group) for group in groups[MAX_FINDINGS:]), "finding")
    for finding in waived[:MAX_FINDINGS]:
        line = f"waived: {finding.gate}: {finding.title} at {finding.where or finding.op}"
        console.print(Text(one_line(line), style="dim"))
    say_more(console, len(waived) - MAX_FINDINGS, "waived finding")


def _print_finding(group: Sequence[Finding], is_gated: bool, console: Console) -> None:
    """The first of the group, with the places and costs of the others."""
    finding = group[0]
    style = _SEVERITY_STYLES[finding.severity]
    gate = f" {finding.gate}" + (" (fails the gate)" if is_gated else "")
    console.print(
        Text.assemble((finding.severity.value, style), gate, one_line(f"  {finding.title}"))
    )
    print_field(console, "where", one_line(" ".join(where_words(finding))))
    print_field(console, "cost", ", ".join(finding_cost(finding)))
    for other in group[1:]:
        place = other.where.rpartition("/")[2]
        print_field(console, "also", f"{place}: {', '.join(finding_cost(other))}")
    for fact in finding.evidence[:_MAX_EVIDENCE]:
        print_field(console, "found", one_line(evidence_text(fact)))
    print_field(console, "remedy", finding.remedy)
