"""A report as tables of at most 100 columns that stay readable at 80; colour on terminals only."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from hal.auditing.document import AuditReport
from hal.auditing.gate import gated_findings
from hal.auditing.gates import GateClass
from hal.auditing.quantities import format_bytes, format_count, format_share, format_time
from hal.auditing.summary import RowGroup, coverage_shares, observed_time_us, row_groups, verdict
from hal.auditing.terminal_findings import print_findings
from hal.auditing.terminal_layout import broken, create_table, one_line, print_field, say_more
from hal.cli.output import MAX_COLUMNS, create_console

MAX_ROWS: Final = 40
MIN_SHARE: Final = 0.001
"""Of the time: what takes less, outside bound ops, is counted only."""
MIN_SHARE_OTHER: Final = 0.01
"""Of ops of no class: a program has dozens, views among them."""
TIER_STYLES: Final = {
    "native": "green",
    "tuned": "cyan",
    "portable": "yellow",
    "reference": "red",
    "outside": "red",
    "host": "yellow",
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
    print_findings(report, fail_on, console)
    _print_refusals(report, console)
    _print_variables(report, console)
    _print_waivers(report, console)
    _print_verification(report, console)
    for note in report.notes:
        console.print(Text(one_line(f"note: {note}"), style="yellow"))
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
    console.print(Text.assemble(("audit of ", "dim"), (one_line(report.subject), "bold")))
    machine = report.machine
    rates = "measured here" if machine.is_measured else "not measured here"
    console.print(Text(one_line(f"{machine.label} ({rates}); {', '.join(parts)}"), style="dim"))


def _print_rows(report: AuditReport, console: Console) -> None:
    groups = row_groups(report)
    if not groups:
        return
    total = observed_time_us(report)
    shown = [group for group in groups if not _is_small(group, total)][:MAX_ROWS]
    is_wide = console.width >= MAX_COLUMNS
    numbers = ("places", "calls", "time", "share", "bound")
    op_width, name_width = (24, 29) if is_wide else (18, 20)
    table = create_table("", "op", "implementation", numbers=numbers if is_wide else numbers[1:])
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
            Text(broken(one_line(group.op), op_width)),
            _implementation(group, name_width),
            *(cells if is_wide else cells[1:]),
        )
    console.print(table)
    say_more(console, len(groups) - len(shown), "row")
    if any(group.achieved is not None for group in groups):
        console.print(Text("bound: roofline time over observed time", style="dim"))


def _implementation(group: RowGroup, width: int) -> Text:
    """Its name, with the tier beside it where there is room."""
    name = broken(one_line(group.implementation), width)
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


def _print_coverage(report: AuditReport, console: Console) -> None:
    if not report.coverage:
        return
    table = create_table("work by tier", "tier", numbers=("calls", "FLOPs", "bytes", "time"))
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


def _print_refusals(report: AuditReport, console: Console) -> None:
    for refusal in report.refusals:
        if refusal.is_swallowed:
            head, style = "refusal that the program swallowed", "bold red"
        else:
            head, style = "refusal", "dim"
        place = "" if refusal.location is None else f" at {refusal.location}"
        console.print(
            Text.assemble((one_line(f"{head}{place}"), style), one_line(f"  {refusal.who}"))
        )
        print_field(console, "found", f"required {refusal.required}, found {refusal.found}")
        print_field(console, "remedy", refusal.remedy)


def _print_variables(report: AuditReport, console: Console) -> None:
    if not report.variables:
        return
    table = create_table("variables of the environment", "variable", "effect")
    for variable in report.variables:
        style = "yellow" if variable.is_slow else ""
        table.add_row(
            Text(one_line(f"{variable.name}={variable.value}"), style=style), Text(variable.effect)
        )
    console.print(table)


def _print_waivers(report: AuditReport, console: Console) -> None:
    if not report.waivers:
        return
    table = create_table("waivers", "state", "waiver", numbers=("calls",))
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
    console.print(Text(one_line(line)))
    for what, site in (
        ("first divergence", found.first_divergence),
        ("first value that is not finite", found.first_non_finite),
    ):
        if site:
            console.print(Text(one_line(f"{what}: {site}"), style="bold red"))
