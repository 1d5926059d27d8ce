"""The database as one document in the schema of its files, and what two databases differ in."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from hal_capability_db.assembly import Draft
from hal_capability_db.database import Database
from hal_capability_db.facts import database_facts
from hal_capability_db.schema import ENTRY_MODELS, SCHEMA
from hal_capability_db.values import Fact


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that two databases do not agree on; None where one of them has none."""

    name: str
    before: Fact[Any] | None
    after: Fact[Any] | None


def document_of(draft: Draft, only: Collection[str] = ()) -> dict[str, Any]:
    """A document with every entry after overlays, which loads as a database of its own.

    Args:
        only: ids of devices, families or architectures; their families, architectures and sources
            come along. Everything by default.
    """
    wanted = _closure(draft, only) if only else set(draft.raws)
    document: dict[str, Any] = {"schema": SCHEMA, "complete": True, "sources": {}}
    used: set[str] = set()
    for section in ENTRY_MODELS:
        entries = [
            _plain(raw)
            for (kind, name), raw in draft.raws.items()
            if (kind, name) in wanted and kind == section
        ]
        for entry in entries:
            entry.pop("overrides", None)
            used.update(_sources(entry))
        if entries:
            document[section] = entries
    document["sources"] = {
        name: text for name, text in sorted(draft.sources.items()) if not only or name in used
    }
    return document


def differences(before: Database, after: Database) -> list[Difference]:
    """Every fact that is not the same, sorted by name. Where an entry comes from does not count."""
    old, new = database_facts(before), database_facts(after)
    return [
        Difference(name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _closure(draft: Draft, only: Collection[str]) -> set[tuple[str, str]]:
    wanted: set[tuple[str, str]] = set()
    for name in only:
        for section in ("families", "architectures", "devices"):
            if (section, name) in draft.raws:
                wanted.add((section, name))
    for section, name in list(wanted):
        if section == "devices":
            wanted.add(("architectures", draft.devices[name].arch))
            wanted.add(("families", draft.devices[name].family))
    for section, name in list(wanted):
        if section == "architectures":
            architecture = draft.architectures[name]
            families = [architecture.family, *architecture.shared_with]
            wanted.update(("families", family) for family in families)
    for (section, name), raw in draft.raws.items():
        if section == "links" and ("devices", str(raw.get("device"))) in wanted:
            wanted.add((section, name))
    return wanted


def _plain(value: Any) -> Any:
    """Ordinary dictionaries and lists, which writers know."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _sources(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        if isinstance(value.get("source"), list):
            yield from map(str, value["source"])
        for item in value.values():
            yield from _sources(item)
    elif isinstance(value, list):
        for item in value:
            yield from _sources(item)
