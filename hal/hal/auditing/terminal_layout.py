"""How the parts of a report are laid out on a terminal: tables, fields, lines, names that break."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hal.auditing.quantities import plural


def create_table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    """Columns of text, then of numbers."""
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


def print_field(console: Console, name: str, text: str) -> None:
    """`  remedy: …`, whose further lines are indented; nothing for nothing."""
    if text:
        console.print(Padding(Text.assemble((f"{name}: ", "dim"), text), (0, 0, 0, 2)))


def one_line(text: str) -> str:
    """Names of others on one line: behind a line end they could pass for lines of the report, or
    for commands to the service whose log this is."""
    return "\\n".join(text.splitlines())


def broken(name: str, width: int) -> str:
    """A name on lines of so many columns: it breaks behind a dot, a colon or an underscore."""
    lines = [""]
    for part in re.findall(r"[^._:]*[._:]+|[^._:]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def say_more(console: Console, count: int, noun: str) -> None:
    """`… and 3 more rows`; nothing for nothing."""
    if count > 0:
        console.print(Text(f"… and {plural(count, f'more {noun}')}: see --json", style="dim"))
