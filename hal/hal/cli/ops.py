"""`hal ops`: the op catalogue."""

import dataclasses
from typing import Annotated

import typer

from hal.cli.output import print_json, print_table


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("ops")(_ops)


def _ops(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every op of the catalogue, with the arguments that decide which kernel can serve it."""
    from hal.ops import CATALOGUE

    document = [
        {
            "op": family.name,
            "summary": family.summary,
            "arguments": {
                field.name: field.type if isinstance(field.type, str) else field.type.__name__
                for field in dataclasses.fields(family.request_type)
            },
            "has_weight": family.is_weighted,
            "tolerances": {
                dtype: {"rtol": bound.rtol, "atol": bound.atol}
                for dtype, bound in family.tolerances.items()
            },
        }
        for family in CATALOGUE.values()
    ]
    if as_json:
        print_json(document)
        return
    rows = [
        (
            family.name,
            family.summary,
            ", ".join(f.name for f in dataclasses.fields(family.request_type)),
        )
        for family in CATALOGUE.values()
    ]
    print_table(("op", "what it does", "arguments that decide"), rows)
