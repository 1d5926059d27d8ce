"""`hal settings`: effective values and where each comes from."""

import json
from typing import Annotated

import typer

from hal.cli.context import cli_context
from hal.cli.output import print_json, print_table, print_variables


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("settings")(_settings)


def _settings(
    ctx: typer.Context,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only what differs from the defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every setting with its value and source, then variables of others; secrets are masked.

    Sources, later ones win: defaults, configuration file, HAL_<SECTION>_<KEY>, options.
    """
    from hal.auditing.foreign_variables import foreign_variables

    rows = cli_context(ctx).settings.rows()
    if changed:
        rows = tuple(row for row in rows if row.source != "default")
    if as_json:
        print_json(
            [
                {
                    "key": row.key,
                    "value": row.value,
                    "source": row.source,
                    "description": row.description,
                }
                for row in rows
            ]
            + [
                {
                    "key": f"${variable.name}",
                    "value": variable.value,
                    "source": f"environment, {variable.source}",
                    "description": variable.effect,
                }
                for variable in foreign_variables()
            ]
        )
        return
    print_table(
        ("key", "value", "source", "meaning"),
        [
            (row.key, json.dumps(row.value, ensure_ascii=False), row.source, row.description)
            for row in rows
        ],
    )
    print_variables(foreign_variables())
