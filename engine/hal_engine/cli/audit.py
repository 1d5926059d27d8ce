"""`hal audit MODEL`: run the model for a moment and show what ran against what was planned."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal_engine.cli import arguments as args
from hal_engine.cli.plan_table import TIER_STYLES, say, terminal

if TYPE_CHECKING:
    from hal_engine.audit import AuditReport


def audit(
    ctx: typer.Context,
    model: args.Model,
    precision: args.Precision = None,
    device: args.Device = None,
    use: args.Use = None,
    waivers: args.Waivers = None,
    set_: args.Set = None,
) -> None:
    """Run a short synthetic load and compare the calls with the plan.

    Exit code 1 if a matrix product, attention or collective ran outside a bound op, or a planned
    call site was never called.
    """
    from hal_engine.audit import audit_model  # torch takes seconds: not for `hal plan`

    session = args.read_session(
        ctx,
        model,
        consumer="hal audit",
        assignments=set_,
        use=use,
        flags={
            "engine.precision": precision,
            "engine.device": device,
            "selection.waivers": waivers,
        },
    )
    planned, registry = args.plan_session(session)
    report = audit_model(planned, registry)
    print_audit(report, terminal())
    if report.escaped or report.never_called:
        raise typer.Exit(1)


def print_audit(report: AuditReport, console: Console) -> None:
    """A row per op and implementation, then what escaped and what was never called."""
    console.print(
        Text.assemble(("audit of plan ", "dim"), (report.planned.plan.hash, "bold")),
        Text(f"{Path(report.planned.config.source).name} on {report.planned.plan.device_label}"),
    )
    calls: dict[tuple[str, str, str, str], int] = defaultdict(int)
    sites: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
    for count in report.counts:
        label = count.op if count.phase == "any" else f"{count.op}.{count.phase}"
        key = (label, count.implementation, count.tier, str(count.tokens))
        calls[key] += count.calls
        sites[key].add(count.site)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("op", "implementation", "tier", "tokens"):
        table.add_column(name, no_wrap=True)
    table.add_column("sites", justify="right")
    table.add_column("calls", justify="right")
    for key, total in sorted(calls.items()):
        label, implementation, tier, tokens = key
        table.add_row(
            label,
            implementation,
            Text(tier, style=TIER_STYLES[tier]),
            tokens,
            str(len(sites[key])),
            f"{total:,}",
        )
    console.print(table)
    say(
        console,
        f"{sum(calls.values()):,} calls through bound ops; {report.num_tracked:,} torch matrix "
        f"products, attentions and collectives seen, {len(report.escaped)} outside a bound op",
    )
    for escape in report.escaped[:20]:
        say(console, Text(f"unrouted: {escape.op} at {escape.location}", style="bold red"))
    for count in report.never_called[:20]:
        say(console, Text(f"never called: {count.site} ({count.phase})", style="yellow"))
