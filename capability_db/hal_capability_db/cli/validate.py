"""`hal db validate`: every problem of database files at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hal.cli.output import print_json, print_text
from hal_capability_db.cli.context import overlays_of
from hal_capability_db.loader import draft_database


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("validate")(_validate)


def _validate(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders, as overlays of the built-in data."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check files, or without any the built-in data and the overlays of the settings.

    Exit code 1 if something is wrong; every problem is listed with its file, line and key.
    """
    chosen = tuple(paths) if paths else overlays_of(ctx)
    draft = draft_database(chosen)
    counts = {
        "devices": len(draft.devices),
        "families": len(draft.families),
        "architectures": len(draft.architectures),
        "links": len(draft.links),
        "sources": len(draft.sources),
    }
    if as_json:
        problems = [problem.to_document() for problem in draft.problems]
        files = [str(path) for path in chosen]
        print_json({"overlays": files, "problems": problems, "valid": counts})
    else:
        for problem in draft.problems:
            print_text(f"{problem}\n")
        number = len(draft.problems)
        held = ", ".join(f"{count} {what}" for what, count in counts.items())
        verdict = f"{number} problem{'s' if number > 1 else ''}" if number else "no problem"
        print_text(f"{verdict} in {_checked(len(chosen))}: {held}")
    if draft.problems:
        raise typer.Exit(1)


def _checked(overlays: int) -> str:
    more = "" if not overlays else f" and {overlays} overlay{'s' if overlays > 1 else ''}"
    return f"the built-in data{more}"
