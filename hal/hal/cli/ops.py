"""`hal ops`: the op catalogue."""

import dataclasses
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from hal.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from hal.ops import OpFamily

_OF_EVERY_OP = ("phase", "tokens", "graph_mode")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("ops")(_ops)


def _ops(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Every op of the catalogue, with the arguments that decide which kernel can serve it."""
    from hal.ops import CATALOGUE

    if as_json:
        print_json([_document(family) for family in CATALOGUE.values()])
        return
    rows = [
        (
            "\n".join((family.name, *(f"  .{kind}" for kind in family.kinds))),
            family.summary,
            ", ".join(n for n in _arguments(family) if n not in _OF_EVERY_OP),
        )
        for family in CATALOGUE.values()
    ]
    print_table(("op", "what it does", "arguments that decide"), rows)
    print_text(f"Of every op: {', '.join(_OF_EVERY_OP)}. `--json` adds types and tolerances.")


def _document(family: "OpFamily") -> dict[str, Any]:
    return {
        "op": family.name,
        "summary": family.summary,
        "labels": family.labels(),
        "arguments": _arguments(family),
        "has_weight": family.is_weighted,
        "tolerances": {
            dtype: {"rtol": bound.rtol, "atol": bound.atol}
            for dtype, bound in family.tolerances.items()
        },
        "largest_errors": dict(family.largest_errors),
    }


def _arguments(family: "OpFamily") -> dict[str, str]:
    """Each argument of the family's requests: its type, or the words that it may be."""
    hints = typing.get_type_hints(family.request_type)
    return {f.name: _type(hints[f.name]) for f in dataclasses.fields(family.request_type)}


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(repr(word) for word in get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)
