"""`hal db diff`: what two databases say differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hal.cli.output import print_json, print_table, print_text
from hal_capability_db.cli.context import overlays_of
from hal_capability_db.cli.show import fact_document
from hal_capability_db.database import Database
from hal_capability_db.export import Difference, differences
from hal_capability_db.loader import BUILT_IN, load_database
from hal_capability_db.quantities import fact_text
from hal_capability_db.values import Fact

EFFECTIVE = "effective"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("diff")(_diff)


def _diff(
    ctx: typer.Context,
    before: Annotated[
        str, typer.Argument(help="`built-in`, `effective`, an overlay or an export.")
    ] = BUILT_IN,
    after: Annotated[str, typer.Argument(help="The same, to compare with.")] = EFFECTIVE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two databases fact by fact; exit code 1 if they differ.

    `built-in` is what this version ships, `effective` that under the overlays of the settings. A
    path is an overlay of the built-in data, or an export, which stands alone.
    """
    found = differences(_database(ctx, before), _database(ctx, after))
    if as_json:
        print_json([_document(difference) for difference in found])
    elif found:
        rows = [(item.name, _text(item.before), _text(item.after)) for item in found]
        print_table(("fact", before, after), rows)
        print_text(f"{len(found)} differences")
    else:
        print_text("no differences")
    if found:
        raise typer.Exit(1)


def _database(ctx: typer.Context, name: str) -> Database:
    if name == BUILT_IN:
        return load_database(())
    if name == EFFECTIVE:
        return load_database(overlays_of(ctx))
    return load_database((Path(name),))


def _text(fact: Fact[Any] | None) -> str:
    if fact is None:
        return "(absent)"
    source = f" [{fact.confidence}: {', '.join(fact.source)}]" if fact.source else ""
    note = f" {fact.note}" if fact.note else ""
    return f"{fact_text(fact)}{source}{note}"


def _document(difference: Difference) -> dict[str, Any]:
    before, after = difference.before, difference.after
    return {
        "name": difference.name,
        "before": None if before is None else fact_document(before),
        "after": None if after is None else fact_document(after),
    }
