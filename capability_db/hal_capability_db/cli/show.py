"""`hal db show`: every fact of a device, family or architecture, with source and confidence."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hal.cli.output import print_json
from hal.suggestions import did_you_mean
from hal_capability_db.cli.context import database_of
from hal_capability_db.cli.sheet import print_sheet
from hal_capability_db.database import Database
from hal_capability_db.errors import DatabaseError
from hal_capability_db.facts import Entity, entry_facts
from hal_capability_db.values import Fact


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("show")(_show)


def _show(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Id of a device, family or architecture.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every fact of a device, family or architecture, with its source and confidence."""
    database = database_of(ctx)
    entry = find_entry(database, name)
    if as_json:
        print_json(_document(database, entry))
        return
    print_sheet(database, entry)


def find_entry(database: Database, name: str) -> Entity:
    """The device, family or architecture of an id, looked for in this order.

    Raises:
        DatabaseError: there is none; with the nearest id.
    """
    for entries in (database.devices, database.families, database.architectures):
        if name in entries:
            entry: Entity = entries[name]
            return entry
    known = [*database.devices, *database.families, *database.architectures]
    raise DatabaseError(
        f"hal db show {name[:80]}",
        "the id of a device, family or architecture",
        "none of that id",
        did_you_mean(name, known),
    )


def _document(database: Database, entry: Entity) -> dict[str, Any]:
    facts = entry_facts(entry)
    links = [link for link in database.links if link.device == entry.id]
    cited = {source for fact in facts.values() for source in fact.source}
    cited |= {source for link in links for source in link.value.source}
    return {
        "id": entry.id,
        "kind": type(entry).__name__.removesuffix("Profile").lower(),
        "from": entry.origin,
        "facts": {key: fact_document(fact) for key, fact in facts.items()},
        "links": [
            {
                "metric": link.metric,
                "implementation": link.implementation,
                "world_size": link.world_size,
                "message_bytes": link.message_bytes,
                **fact_document(link.value),
            }
            for link in links
        ],
        "sources": {key: database.sources[key] for key in sorted(cited)},
    }


def fact_document(fact: Fact[Any]) -> dict[str, Any]:
    """A fact for JSON."""
    value = sorted(fact.value) if isinstance(fact.value, frozenset) else fact.value
    return {
        "value": value,
        "unit": fact.unit,
        "confidence": fact.confidence if fact.source else "",
        "source": list(fact.source),
        "note": fact.note,
    }
