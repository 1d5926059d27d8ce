"""`hal db export`: the database, or a part of it, as one file in the schema of its files."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hal.suggestions import did_you_mean
from hal.text_files import write_user_text
from hal_capability_db.assembly import Draft
from hal_capability_db.cli.context import database_of, overlays_of
from hal_capability_db.errors import DatabaseError
from hal_capability_db.export import document_of
from hal_capability_db.loader import draft_database


class Format(StrEnum):
    """How to write."""

    YAML = "yaml"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("export")(_export)


def _export(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Ids of devices, families or architectures; everything by default."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write.")] = Format.YAML,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; standard output by default.")
    ] = None,
) -> None:
    """Write the database after overlays as one file; it loads as a database of its own."""
    database_of(ctx)  # refuses a bad file before anything is written
    draft = draft_database(overlays_of(ctx))
    for name in names or ():
        _require_known(draft, name)
    text = render(document_of(draft, names or ()), form)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        write_user_text(output, text)
    except OSError as error:
        found = error.strerror or str(error)
        remedy = "name another file"
        raise DatabaseError(f"--output {output}", "a writable file", found, remedy) from error


def render(document: dict[str, Any], form: Format) -> str:
    """The text of a document."""
    if form is Format.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _require_known(draft: Draft, name: str) -> None:
    known = [identity for section, identity in draft.raws if section != "links"]
    if name not in known:
        raise DatabaseError(
            f"hal db export {name[:80]}",
            "the id of a device, family or architecture",
            "none of that id",
            did_you_mean(name, known),
        )
