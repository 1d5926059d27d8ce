"""Puts the entries of a database's files together: overlays over built-in entries, no id twice.

This is the only place that decides which entry wins: a later layer's, and only if it states
`overrides: true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import ValidationError

from hal.suggestions import did_you_mean
from hal_capability_db.errors import DatabaseError
from hal_capability_db.faults import entry_faults, shown
from hal_capability_db.located import LocatedList, LocatedMap, Place, refusal
from hal_capability_db.merging import merged
from hal_capability_db.schema import (
    ENTRY_MODELS,
    SCHEMA,
    SECTIONS,
    ArchitectureEntry,
    DeviceEntry,
    FamilyEntry,
    LinkEntry,
)

_MAX_SOURCE_CHARACTERS = 1000
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Layer:
    """The parsed files of the built-in data or of one overlay, and the name of where they are."""

    name: str
    documents: tuple[LocatedMap, ...]


@dataclass(slots=True)
class Draft:
    """Judged entries by id, what stands where, and every problem that was found."""

    problems: list[DatabaseError] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    families: dict[str, FamilyEntry] = field(default_factory=dict)
    architectures: dict[str, ArchitectureEntry] = field(default_factory=dict)
    devices: dict[str, DeviceEntry] = field(default_factory=dict)
    links: dict[str, LinkEntry] = field(default_factory=dict)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    raws: dict[tuple[str, str], LocatedMap] = field(default_factory=dict)

    def copy(self) -> Draft:
        """The same, to add further layers to; entries are shared, as nothing changes them."""
        return Draft(**{item.name: getattr(self, item.name).copy() for item in fields(self)})

    def place(self, section: str, name: str, *path: str) -> Place:
        """Where an entry, or a key of it, stands."""
        raw = self.raws[section, name]
        place = raw.place
        value: Any = raw
        for part in path:
            if not isinstance(value, LocatedMap) or part not in value:
                break
            place, value = value.places[part], value[part]
        return place


def assemble(layers: Sequence[Layer], base: Draft | None = None) -> Draft:
    """The entries of all layers over those of `base`. Problems are collected, not raised."""
    draft = Draft() if base is None else base.copy()
    for layer in layers:
        added: set[tuple[str, str]] = set()
        for document in layer.documents:
            _add_document(draft, document, layer.name, added)
    known = {} if base is None else base.raws
    _judge_entries(draft, [key for key, raw in draft.raws.items() if known.get(key) is not raw])
    return draft


def _add_document(
    draft: Draft, document: LocatedMap, layer: str, added: set[tuple[str, str]]
) -> None:
    for key in document:
        if key not in SECTIONS:
            found = f"the unknown key {key!r}"
            remedy = did_you_mean(key, SECTIONS)
            problem = refusal(document.places[key], key, "a known key", found, remedy)
            draft.problems.append(problem)
    if document.get("schema") != SCHEMA:
        found = shown(document["schema"]) if "schema" in document else "nothing"
        place = document.places.get("schema", document.place)
        remedy = f"write `schema: {SCHEMA}`"
        draft.problems.append(refusal(place, "schema", SCHEMA, found, remedy))
    if not isinstance(document.get("complete", False), bool):
        place = document.places["complete"]
        found = shown(document["complete"])
        problem = refusal(place, "complete", "true or false", found, "correct it")
        draft.problems.append(problem)
    _add_sources(draft, document)
    for section in ENTRY_MODELS:
        _add_entries(draft, document, section, layer, added)


def _add_sources(draft: Draft, document: LocatedMap) -> None:
    sources = document.get("sources")
    if sources is None:
        return
    if not isinstance(sources, LocatedMap):
        place = document.places["sources"]
        remedy = "write `sources: {ID: TEXT}`"
        draft.problems.append(refusal(place, "sources", "a mapping", shown(sources), remedy))
        return
    for name, text in sources.items():
        place, key = sources.places[name], f"sources.{name}"
        required = f"a text of at most {_MAX_SOURCE_CHARACTERS} characters"
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_SOURCE_CHARACTERS:
            draft.problems.append(refusal(place, key, required, shown(text), "name the source"))
        elif draft.sources.get(name, text) != text:
            required, found = "one meaning of an id", "another text than before"
            draft.problems.append(refusal(place, key, required, found, "choose another id"))
        else:
            draft.sources[name] = text


def _add_entries(
    draft: Draft, document: LocatedMap, section: str, layer: str, added: set[tuple[str, str]]
) -> None:
    entries = document.get(section)
    if entries is None:
        return
    place = document.places[section]
    if not isinstance(entries, LocatedList):
        remedy = "write one `- id: …` for each entry"
        draft.problems.append(refusal(place, section, "a list", shown(entries), remedy))
        return
    for index, raw in enumerate(entries):
        place = entries.places[index]
        if not isinstance(raw, LocatedMap):
            key = f"{section}.{index}"
            draft.problems.append(refusal(place, key, "a mapping", shown(raw), "correct it"))
        elif section == "links":
            draft.raws[section, f"{place}"] = raw
            draft.origins[section, f"{place}"] = layer
        elif not isinstance(raw.get("id"), str):
            found = shown(raw["id"]) if "id" in raw else "nothing"
            key = f"{section}.{index}.id"
            remedy = "give the entry an id"
            draft.problems.append(
                refusal(raw.places.get("id", place), key, "a text", found, remedy)
            )
        else:
            _add_entry(draft, section, raw, layer, added)


def _add_entry(
    draft: Draft, section: str, raw: LocatedMap, layer: str, added: set[tuple[str, str]]
) -> None:
    name = str(raw["id"])
    key = section, name
    earlier = draft.raws.get(key)
    does_override = raw.get("overrides") is True
    place = raw.places["id"]
    dotted = f"{section}.{name[:_SHOWN]}"
    if earlier is None and does_override:
        known = [known_name for kind, known_name in draft.raws if kind == section]
        required = "an earlier entry of that id, as it says `overrides: true`"
        draft.problems.append(refusal(place, dotted, required, "none", did_you_mean(name, known)))
    elif earlier is not None and (key in added or not does_override):
        required = "an id that no other entry has"
        found = f"{name!r}, which is also at {earlier.places['id']}"
        remedy = "choose another id"
        if key not in added:
            remedy += ", or write `overrides: true` to change that entry"
        draft.problems.append(refusal(place, dotted, required, found, remedy))
        return
    draft.raws[key] = raw if earlier is None else merged(earlier, raw)
    draft.origins[key] = layer
    added.add(key)


def _judge_entries(draft: Draft, keys: Sequence[tuple[str, str]]) -> None:
    for section, name in keys:
        raw = draft.raws[section, name]
        try:
            entry = ENTRY_MODELS[section].model_validate(raw)
        except ValidationError as error:
            dotted = section if section == "links" else f"{section}.{name[:_SHOWN]}"
            draft.problems += entry_faults(error, raw, ENTRY_MODELS[section], dotted)
            continue
        if isinstance(entry, FamilyEntry):
            draft.families[name] = entry
        elif isinstance(entry, ArchitectureEntry):
            draft.architectures[name] = entry
        elif isinstance(entry, DeviceEntry):
            draft.devices[name] = entry
        elif isinstance(entry, LinkEntry):
            draft.links[name] = entry
