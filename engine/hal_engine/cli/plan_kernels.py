"""The compiled kernels of a plan: what their machine code proves, and on what configurations rest.

A row per kernel, variant and configuration, with the call site that may lose most by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hal.candidates import KernelUse
from hal.kernel_uses import planned_uses
from hal.plan import Plan
from hal_engine.cli.plan_table import say

_BASIS_STYLES = {"measured": "green", "modelled": "cyan", "default": "yellow", "fixed": ""}
_BESTS = {
    "measured": "; none was measured faster",
    "modelled": "; none faster by the model",
    "default": "; none faster by the model",
}


@dataclass(slots=True)
class _Row:
    use: KernelUse
    classes: set[str] = field(default_factory=set)
    worst: tuple[float, str] | None = None
    unknown: str = ""


def print_kernels(plan: Plan, console: Console) -> None:
    """Prints nothing for a plan whose implementations say nothing of compiled kernels."""
    rows = _rows(plan)
    if not rows:
        return
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left",
        title="Compiled kernels, what their machine code proves, and their configurations",
    )  # fmt: skip
    # A name is one word, so that it can be searched for; what stands behind it may fold.
    longest = max(len(row.use.kernel) for row in rows)
    table.add_column("kernel", overflow="fold", min_width=longest)
    table.add_column("machine code", overflow="fold")
    table.add_column("configuration", overflow="fold")
    for row in rows:
        table.add_row(
            f"{row.use.kernel} {row.use.config}".strip(),
            _code(row.use),
            _configuration(row),
        )
    console.print(table)
    if any(row.use.basis in ("default", "modelled") for row in rows):
        say(
            console,
            "A default is not tuned for this device, and a modelled configuration was never "
            "measured on one: what it may lose at most is estimated by a model, of the call site "
            "that loses most. `hal kernels tune` measures, or ranks by the model.",
            "dim",
        )


def _rows(plan: Plan) -> list[_Row]:
    rows: dict[tuple[str, str, str, str], _Row] = {}
    for op in plan.ops:
        name = op.site.site.removeprefix("layers.*.")
        for use in planned_uses(op):
            row = rows.setdefault((use.kernel, use.config, use.configuration, use.basis), _Row(use))
            row.classes.add(use.shape)
            tokens = use.shape.rpartition("rows=")[2]
            if use.loss is not None and (row.worst is None or use.loss > row.worst[0]):
                row.worst = (use.loss, f"{name}, {tokens} rows")
            elif use.loss is None and use.basis != "fixed":
                row.unknown = use.note
    return list(rows.values())


def _code(use: KernelUse) -> str:
    if not use.code:
        return use.note or "nothing is stored"
    return f"{use.code} ({use.caveat})" if use.caveat else use.code


def _configuration(row: _Row) -> Text:
    use = row.use
    if use.basis == "fixed":
        return Text("one", style="dim")
    text = Text(use.basis, style=_BASIS_STYLES.get(use.basis, ""))
    number = len(row.classes)
    text.append(f" {use.configuration} for {number} class{'es' * (number > 1)}")
    if row.worst is not None:
        share, where = row.worst
        text.append(f"; may lose {share:.0%}" if share >= 0.005 else _BESTS.get(use.basis, ""))
        if share >= 0.005:
            text.append(f" ({where})", style="dim")
    elif row.unknown:
        text.append(f"; loss not known: {row.unknown}", style="dim")
    if row.worst is not None and "kept: " in use.note:
        text.append(f"; kept: {use.note.rpartition('kept: ')[2]}", style="yellow")
    return text
