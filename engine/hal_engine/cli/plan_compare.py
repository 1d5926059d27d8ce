"""Two plans of one model side by side: what each device would run, and how long at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.plan import Plan, PlannedOp
from hal_engine.cli.plan_report import collect_losses, memory_line, step_name
from hal_engine.cli.plan_table import TIER_STYLES, broken, say

Key = tuple[str, str]


def print_comparison(plans: Sequence[Plan], console: Console) -> None:
    """A row per op with both choices, then the steps, the losses and the memory of each."""
    console.print(_choices(plans, console.width))
    console.print(_steps(plans))
    for plan in plans:
        losses = collect_losses(plan)
        say(
            console,
            Text.assemble(
                (plan.device_label, "bold"),
                f": plan {plan.hash}; lost fast paths: {len(losses)}",
            ),
        )
        if plan.memory is not None:
            say(console, Text("  " + memory_line(plan.memory, len(plan.devices)), style="dim"))


def comparison_document(plans: Sequence[Plan]) -> dict[str, Any]:
    """Both plans, whole, under one schema."""
    return {"schema": "halstack.plan-comparison/1", "plans": [plan.to_dict() for plan in plans]}


def _choices(plans: Sequence[Plan], columns: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("op")
    for plan in plans:
        table.add_column(plan.device_label, overflow="fold")
    found = [_by_op(plan) for plan in plans]
    keys = list(dict.fromkeys(key for choices in found for key in choices))
    longest = max((len(" ".join(filter(None, key))) for key in keys), default=0)
    room = max(16, (columns - longest) // len(plans) - 3)
    for key in keys:
        cells = [_cell(choices.get(key, []), room) for choices in found]
        style = "" if len({cell.plain for cell in cells}) == 1 else "bold"
        table.add_row(Text(" ".join(filter(None, key)), style=style), *cells)
    return table


def _by_op(plan: Plan) -> dict[Key, list[PlannedOp]]:
    """Call site without its layers, and phase -> its ranges."""
    found: dict[Key, list[PlannedOp]] = {}
    for op in plan.ops:
        phase = op.site.request.phase
        key = (op.site.site.removeprefix("layers.*."), "" if phase == "any" else phase)
        found.setdefault(key, []).append(op)
    return found


def _cell(ops: Sequence[PlannedOp], room: int) -> Text:
    choices = dict.fromkeys((op.choice.name, op.choice.tier.label) for op in ops)
    cell = Text()
    for name, tier in choices:
        if cell:
            cell.append("\n")
        cell.append(broken(name, room) + " ")
        cell.append(tier, style=TIER_STYLES[tier])
    return cell or Text("nothing", style="red")


def _steps(plans: Sequence[Plan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("least time of a step")
    for plan in plans:
        table.add_column(plan.device_label, justify="right")
    table.add_column("ratio", justify="right")
    if any(step.unknown or step.partial for plan in plans for step in plan.steps):
        table.caption = "+ a part is not counted or memory only: the plan of each device says which"
        table.caption_justify = "left"
    for rows in zip(*(plan.steps for plan in plans), strict=True):
        times = [row.total_us for row in rows]
        is_whole = all(times) and not any(row.unknown or row.partial for row in rows)
        table.add_row(
            step_name(rows[0]),
            *(
                f"{row.total_us / 1000:,.2f} ms{'+' if row.unknown or row.partial else ''}"
                if row.is_telling
                else "not known"
                for row in rows
            ),
            f"{times[0] / times[-1]:.2f}" if is_whole else "not known",
        )
    return table
