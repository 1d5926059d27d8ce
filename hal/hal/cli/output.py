"""How commands print: tables of at most 100 columns, JSON, errors. Colour on terminals only."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hal.errors import UserError
from hal.visible_text import visible_json, visible_text

if TYPE_CHECKING:
    from hal.auditing.document import Variable

MAX_COLUMNS = 100
_PICTURE_COLUMNS = 140
_STATUS_STYLES = {
    "loaded": "green",
    "idle": "dim",
    "rejected": "yellow",
    "failed": "red",
    "shadowed": "yellow",
    "slow": "yellow",
}


class VisibleConsole(Console):
    """A console that shows the control characters of names and messages instead of obeying them:
    they come from firmware, from recordings and from plug-ins of others."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See `Console.render`, through which all output goes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible_text(text), style, control)


def create_console() -> Console:
    """A console of the terminal's width, at most `MAX_COLUMNS`, that reads no markup."""
    columns = min(MAX_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 24)).columns)
    return VisibleConsole(width=columns, markup=False, highlight=False, emoji=False)


def picture_columns() -> int:
    """How wide a picture may be: the terminal, but not so wide that lines cannot be followed."""
    return min(_PICTURE_COLUMNS, shutil.get_terminal_size((MAX_COLUMNS, 24)).columns)


def print_lines(lines: Iterable[Text]) -> None:
    """Lines as they are, of at most `picture_columns`."""
    console = VisibleConsole(width=_PICTURE_COLUMNS, markup=False, highlight=False, emoji=False)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    whole: Collection[str] = (),
) -> None:
    """A table; long cells wrap, but in columns named in `whole`. A cell that is a plug-in status is
    coloured on a terminal."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(cell, style=_STATUS_STYLES.get(cell, "")) for cell in row))
    create_console().print(table)


def print_variables(variables: Iterable[Variable]) -> None:
    """Variables of others that are set, and what they do; nothing where there are none."""
    rows = [
        (
            f"{variable.name}={variable.value}",
            "slow" if variable.is_slow else "decides" if variable.changes_decision else "",
            f"{variable.effect} ({variable.source})",
        )
        for variable in variables
    ]
    if rows:
        print_table(("variable of others", "", "effect"), rows)


def print_text(text: str) -> None:
    """Text, wrapped to the width of tables."""
    create_console().print(Text(text))


def print_json(document: Any) -> None:
    """A JSON document with sorted keys."""
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    typer.echo(visible_json(text))


def print_error(error: BaseException, *, is_debug: bool) -> None:
    """An error on stderr: its message, and its traceback if debugging."""
    if is_debug:
        typer.echo(visible_text("".join(traceback.format_exception(error))), err=True)
    prefix = typer.style("error:", fg="red", bold=True) if sys.stderr.isatty() else "error:"
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            print_error(part, is_debug=False)
        return
    kind = type(error).__name__ if isinstance(error, UserError) else "internal error"
    typer.echo(f"{prefix} {kind}: {visible_text(str(error))}", err=True)


def format_bytes(count: float) -> str:
    """`31.3 GiB`; empty for nothing known."""
    if count <= 0:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def format_rate(rate: float | None, unit: str) -> str:
    """`31.2 GB/s`, `1.8 TB/s`; empty for nothing known."""
    if rate is None or rate <= 0:
        return ""
    return f"{rate / 1e12:.4g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:.4g} G{unit}"
