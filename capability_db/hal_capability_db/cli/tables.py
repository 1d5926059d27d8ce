"""Tables of `hal db`: ids that never break, numbers to the right, what is unverified in yellow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from hal.cli.output import create_console

UNVERIFIED_MARK = "?"
_STYLES = {
    "vendor-doc": "green",
    "vendor-code": "green",
    "measured": "green",
    "press": "cyan",
    "unverified": "yellow",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `is_fixed` ones never wrap, `is_number` ones stand to the right."""

    title: str
    is_fixed: bool = False
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Heading:
    """A row that heads the rows below it."""

    text: str


Row = Sequence[str] | Heading


def print_rows(columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """A table. Cells that end in a question mark, or name a confidence, are coloured."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.title,
            overflow="fold",
            no_wrap=column.is_fixed,
            justify="right" if column.is_number else "left",
        )
    for row in rows:
        if isinstance(row, Heading):
            table.add_row(Text(row.text, style="bold"))
        else:
            table.add_row(*map(_styled, row))
    create_console().print(table)


def _styled(cell: str) -> Text:
    is_unverified = cell.endswith(UNVERIFIED_MARK)
    return Text(cell, style=_STYLES.get(cell, "yellow" if is_unverified else ""))
