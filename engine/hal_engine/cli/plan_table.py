"""A plan as a table: names fold where a terminal is narrow, nothing is cut off."""

from __future__ import annotations

import re

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.cli.output import VisibleConsole
from hal.plan import Plan, PlannedOp
from hal.reasons import ReasonKind

_PART = re.compile(r"[^._, ]+[._, ]*|[._, ]+")
_FIXED_COLUMNS = 9 + 9 + 9  # tokens and tier, and what lies between columns
_TIME_COLUMNS = 8 + 3
TIER_STYLES = {"native": "green", "tuned": "cyan", "portable": "yellow", "reference": "red"}


def terminal() -> Console:
    """Standard output; where it is no terminal, wide enough that no table is cut."""
    console = VisibleConsole()
    return console if console.is_terminal else VisibleConsole(width=160)


def say(console: Console, text: Text | str, style: str = "") -> None:
    """A sentence, in lines of at most 100 columns however wide the tables are."""
    console.print(text, style=style, highlight=False, width=min(console.width, 100))


def print_plan(plan: Plan, *, with_losers: bool = False, console: Console | None = None) -> None:
    """Prints the heading, a row per site and token range, notes and waivers."""
    console = console or terminal()
    say(
        console,
        Text.assemble(
            ("plan ", "dim"), (plan.hash, "bold"), f"  {plan.model.get('source', '')}  on  "
        )
        + Text(plan.device_label),
    )
    settings = plan.settings
    say(
        console,
        f"precision {settings.get('precision')} ({settings.get('dtype')} activations, "
        f"{settings.get('kv_dtype')} KV cache), tp {settings.get('tp')}, "
        f"{plan.kv_bytes_per_token:,} KV bytes a token",
        "dim",
    )
    console.print(_table(plan, console.width))
    say(console, _times_legend(plan), "dim")
    for note in plan.notes:
        say(console, Text(f"note: {note}", style="yellow"))
    for waiver in plan.waivers_in_use():
        say(console, Text(f"degraded: {waiver}", style="bold red"))
    if with_losers:
        _print_losers(plan, console)


def broken(name: str, width: int) -> str:
    """The name on lines of so many columns, as far as its parts allow: it breaks behind a dot, an
    underscore, a comma or a space, never inside a word."""
    lines = [""]
    for part in _PART.findall(name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _table(plan: Plan, columns: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("call site", overflow="fold")
    table.add_column("tokens", no_wrap=True, min_width=6)
    table.add_column("implementation", overflow="fold")
    table.add_column("tier", no_wrap=True, min_width=9)
    is_estimated = any(op.decision.estimate_us is not None for op in plan.ops)
    if is_estimated:
        table.add_column("est. µs", justify="right", no_wrap=True)
    is_measured = _is_bounded(plan)
    if is_measured:
        table.add_column("bound µs", justify="right", no_wrap=True)
    previous = ""
    taken = _FIXED_COLUMNS + _TIME_COLUMNS * (is_estimated + is_measured)
    room = max(12, (columns - taken) // 2)
    for op in plan.ops:
        site = _site_label(op)
        table.add_row(
            "" if site == previous else broken(site, room),
            str(op.tokens),
            broken(op.choice.name, room),
            Text(op.choice.tier.label, style=TIER_STYLES[op.choice.tier.label]),
            *((_estimate(op),) if is_estimated else ()),
            *((_bound(op),) if is_measured else ()),
        )
        previous = site
    return table


def _is_bounded(plan: Plan) -> bool:
    return any(op.bound is not None for op in plan.ops)


def _estimate(op: PlannedOp) -> str:
    return "" if op.decision.estimate_us is None else f"{op.decision.estimate_us:,.0f}"


def _bound(op: PlannedOp) -> str:
    if op.bound is None:
        return ""
    return f"{op.bound.us:,.0f} {op.bound.by[0]}{'+' if op.bound.is_partial else ''}"


def _times_legend(plan: Plan) -> str:
    """What the times of the table are, and what the least time of a step is."""
    text = "Times are of one call at the upper end of the token range."
    if plan.decode_bound_us is not None:
        text += (
            " Least time of a decode step with one sequence, by the rates of the device (m memory, "
            f"c compute): {plan.decode_bound_us / 1000:.1f} ms, "
            f"{1e6 / plan.decode_bound_us:,.0f} tokens/s."
        )
    elif _is_bounded(plan):
        text += (
            " Bounds (m memory, c compute, l link) are of what the op needs, whatever serves it; "
            "steps count what the implementation does."
        )
    else:
        text += " For rooflines measure it: hal devices --measure"
    return text + _partial_legend(plan)


def _partial_legend(plan: Plan) -> str:
    kinds = {op.bound.by for op in plan.ops if op.bound is not None and op.bound.is_partial}
    words = {
        "memory only": "m+ memory only, the rate of the arithmetic is not known",
        "compute only": "c+ compute only, the bandwidth is not known",
    }
    return "".join(f" {text}." for kind, text in words.items() if kind in kinds)


def _site_label(op: PlannedOp) -> str:
    label = op.site.label()
    phase = op.site.request.phase
    return label if phase == "any" else f"{label} ({phase})"


def _print_losers(plan: Plan, console: Console) -> None:
    """Every candidate that is not for another kind of request, with its reasons."""
    seen: set[str] = set()
    for op in plan.ops:
        for loser in op.decision.rejected:
            if all(reason.kind is ReasonKind.SCOPE for reason in loser.reasons):
                continue
            why = "; ".join(str(reason) for reason in loser.reasons)
            line = f"{op.site.request.label}: {loser.name} ({loser.tier.label}): {why}"
            if line not in seen:
                seen.add(line)
                say(console, Text(line, style="dim"))
