"""A report as tables of at most 100 columns that stay readable at 80; colour on terminals only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hal.auditing.document import AuditReport, Evidence, Finding
from hal.auditing.gate import gated_findings
from hal.auditing.gates import GateClass, Severity
from hal.auditing.quantities import (
    format_bytes,
    format_count,
    format_share,
    format_time,
    plural,
)
from hal.auditing.summary import RowGroup, coverage_shares, observed_time_us, row_groups, verdict
from hal.cli.output import MAX_COLUMNS, create_console

MAX_ROWS: Final = 40
MIN_SHARE: Final = 0.001
MIN_SHARE_OTHER: Final = 0.01
"""Of ops of no class: a program has dozens, views among them."""
"""Of the time: what takes less, outside bound ops, is counted only."""
MAX_FINDINGS: Final = 25
_MAX_EVIDENCE = 6
TIER_STYLES: Final = {
    "native": "green",
    "tuned": "cyan",
    "portable": "yellow",
    "reference": "red",
    "outside": "red",
    "host": "yellow",
}
_SEVERITY_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.NOTE: "bold blue",
}
_WAIVER_STYLES = {"used": "", "unused": "yellow", "expired": "red", "over-broad": "red"}


def print_report(
    report: AuditReport,
    fail_on: frozenset[GateClass] = frozenset(),
    console: Console | None = None,
) -> None:
    """Everything a person acts on, the verdict last. Long lists end with how many more there
    are; the JSON has all."""
    console = console or create_console()
    _print_heading(report, console)
    _print_rows(report, console)
    _print_coverage(report, console)
    _print_findings(report, fail_on, console)
    _print_refusals(report, console)
    _print_variables(report, console)
    _print_waivers(report, console)
    _print_verification(report, console)
    for note in report.notes:
        console.print(Text(_line(f"note: {note}"), style="yellow"))
    is_failed = bool(gated_findings(report, fail_on))
    style = "bold red" if is_failed else "bold green" if fail_on else "bold"
    console.print(Text(verdict(report, fail_on), style=style))


def _print_heading(report: AuditReport, console: Console) -> None:
    parts = [f"{report.kind}, {report.mode} mode"]
    if report.plan_hash:
        parts.append(f"plan {report.plan_hash}")
    if report.time_us:
        parts.append(f"{format_time(report.time_us)} observed")
    if report.processes > 1:
        parts.append(f"{report.processes} processes")
    console.print(Text.assemble(("audit of ", "dim"), (_line(report.subject), "bold")))
    machine = report.machine
    rates = "measured here" if machine.is_measured else "not measured here"
    console.print(Text(_line(f"{machine.label} ({rates}); {', '.join(parts)}"), style="dim"))


def _print_rows(report: AuditReport, console: Console) -> None:
    groups = row_groups(report)
    if not groups:
        return
    total = observed_time_us(report)
    shown = [group for group in groups if not _is_small(group, total)][:MAX_ROWS]
    is_wide = console.width >= MAX_COLUMNS
    numbers = ("places", "calls", "time", "share", "bound")
    op_width, name_width = (24, 29) if is_wide else (18, 20)
    table = _table("", "op", "implementation", numbers=numbers if is_wide else numbers[1:])
    for group in shown:
        share = None if group.time_us is None or not total else group.time_us / total
        cells = (
            f"{group.places:,}",
            Text(format_count(group.calls), style="" if group.calls else "yellow"),
            format_time(group.time_us),
            format_share(share),
            format_share(group.achieved),
        )
        table.add_row(
            Text(_broken(_line(group.op), op_width)),
            _implementation(group, name_width),
            *(cells if is_wide else cells[1:]),
        )
    console.print(table)
    _say_more(console, len(groups) - len(shown), "row")
    if any(group.achieved is not None for group in groups):
        console.print(Text("bound: roofline time over observed time", style="dim"))


def _implementation(group: RowGroup, width: int) -> Text:
    """Its name, with the tier beside it where there is room."""
    name = _broken(_line(group.implementation), width)
    if group.tier == "unknown":
        return Text(name)
    has_room = len(name.rpartition("\n")[2]) + 2 + len(group.tier) <= width
    style = TIER_STYLES.get(group.tier, "")
    return Text.assemble(name, "  " if has_room else "\n", (group.tier, style))


def _is_small(group: RowGroup, total: float | None) -> bool:
    """An op outside every bound op that takes next to nothing of the time."""
    is_other = group.tier in ("outside", "host", "unknown")
    least = MIN_SHARE_OTHER if group.op == "other" else MIN_SHARE
    return is_other and bool(total) and (group.time_us or 0.0) < least * (total or 0.0)


def _broken(name: str, width: int) -> str:
    """A name on lines of so many columns: it breaks behind a dot, a colon or an underscore."""
    lines = [""]
    for part in re.findall(r"[^._:]*[._:]+|[^._:]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _print_coverage(report: AuditReport, console: Console) -> None:
    if not report.coverage:
        return
    table = _table("work by tier", "tier", numbers=("calls", "FLOPs", "bytes", "time"))
    for name, calls, shares in coverage_shares(report):
        work = report.coverage[name]
        amounts = (
            format_count(work.flops),
            format_bytes(work.bytes),
            format_time(work.time_us),
        )
        cells = [
            f"{amount} ({format_share(share)})" if share is not None else amount
            for amount, share in zip(amounts, shares, strict=True)
        ]
        table.add_row(Text(name, style=TIER_STYLES.get(name, "")), format_count(calls), *cells)
    console.print(table)


def _print_findings(report: AuditReport, fail_on: frozenset[GateClass], console: Console) -> None:
    remaining = report.open_findings()
    waived = [finding for finding in report.findings if finding.waiver is not None]
    groups = list(_alike(remaining))
    for group in groups[:MAX_FINDINGS]:
        _print_finding(group, group[0].gate in fail_on, console)
    _say_more(console, sum(len(group) for group in groups[MAX_FINDINGS:]), "finding")
    for finding in waived[:MAX_FINDINGS]:
        line = f"waived: {finding.gate}: {finding.title} at {finding.where or finding.op}"
        console.print(Text(_line(line), style="dim"))
    _say_more(console, len(waived) - MAX_FINDINGS, "waived finding")


def _alike(findings: Sequence[Finding]) -> Iterable[list[Finding]]:
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


def _print_finding(group: Sequence[Finding], is_gated: bool, console: Console) -> None:
    """The first of the group, with the places and costs of the others."""
    finding = group[0]
    style = _SEVERITY_STYLES[finding.severity]
    gate = f" {finding.gate}" + (" (fails the gate)" if is_gated else "")
    console.print(Text.assemble((finding.severity.value, style), gate, _line(f"  {finding.title}")))
    _field(console, "where", _line(" ".join(_where(finding))))
    _field(console, "cost", ", ".join(finding_cost(finding)))
    for other in group[1:]:
        place = other.where.rpartition("/")[2]
        _field(console, "also", f"{place}: {', '.join(finding_cost(other))}")
    for fact in finding.evidence[:_MAX_EVIDENCE]:
        _field(console, "found", _line(evidence_text(fact)))
    _field(console, "remedy", finding.remedy)


def _where(finding: Finding) -> Iterable[str]:
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


def _print_refusals(report: AuditReport, console: Console) -> None:
    for refusal in report.refusals:
        if refusal.is_swallowed:
            head, style = "refusal that the program swallowed", "bold red"
        else:
            head, style = "refusal", "dim"
        place = "" if refusal.location is None else f" at {refusal.location}"
        console.print(Text.assemble((_line(f"{head}{place}"), style), _line(f"  {refusal.who}")))
        _field(console, "found", f"required {refusal.required}, found {refusal.found}")
        _field(console, "remedy", refusal.remedy)


def _print_variables(report: AuditReport, console: Console) -> None:
    if not report.variables:
        return
    table = _table("variables of the environment", "variable", "effect")
    for variable in report.variables:
        style = "yellow" if variable.is_slow else ""
        table.add_row(
            Text(_line(f"{variable.name}={variable.value}"), style=style), Text(variable.effect)
        )
    console.print(table)


def _print_waivers(report: AuditReport, console: Console) -> None:
    if not report.waivers:
        return
    table = _table("waivers", "state", "waiver", numbers=("calls",))
    for use in report.waivers:
        table.add_row(
            Text(use.state, style=_WAIVER_STYLES[use.state]), Text(use.text), f"{use.calls:,}"
        )
    console.print(table)


def _print_verification(report: AuditReport, console: Console) -> None:
    found = report.verification
    if found is None:
        return
    line = f"verified {format_share(found.share)} of the calls: {found.compared_calls:,} compared"
    if found.skipped_calls:
        line += f", {found.skipped_calls:,} skipped"
    if found.worst is not None:
        line += f"; largest error {found.worst:.2g} of its tolerance"
        line += f" at {found.worst_site}" if found.worst_site else ""
    console.print(Text(_line(line)))
    for what, site in (
        ("first divergence", found.first_divergence),
        ("first value that is not finite", found.first_non_finite),
    ):
        if site:
            console.print(Text(_line(f"{what}: {site}"), style="bold red"))


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _field(console: Console, name: str, text: str) -> None:
    """`  remedy: …`, whose further lines are indented; nothing for nothing."""
    if text:
        console.print(Padding(Text.assemble((f"{name}: ", "dim"), text), (0, 0, 0, 2)))


def _line(text: str) -> str:
    """Names of others on one line: behind a line end they could pass for lines of the report, or
    for commands to the service whose log this is."""
    return "\\n".join(text.splitlines())


def _say_more(console: Console, count: int, noun: str) -> None:
    if count > 0:
        console.print(Text(f"… and {plural(count, f'more {noun}')}: see --json", style="dim"))
