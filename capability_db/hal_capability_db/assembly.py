"""Puts the files of a database together: overlays over built-in entries, references, duplicates.

This is the only place that decides which entry wins: a later layer's, and only if it states
`overrides: true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from hal.suggestions import did_you_mean
from hal_capability_db.errors import DatabaseError
from hal_capability_db.faults import entry_faults, shown
from hal_capability_db.located import LocatedList, LocatedMap, Place, refusal
from hal_capability_db.schema import (
    ENTRY_MODELS,
    SCHEMA,
    SECTIONS,
    ArchitectureEntry,
    DeviceEntry,
    Entry,
    FamilyEntry,
    LinkEntry,
    Sourced,
)

_MAX_SOURCE_CHARACTERS = 1000
_GROUP_LISTS = ("peak", "measured", "flags")


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
    links: list[LinkEntry] = field(default_factory=list)
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    raws: dict[tuple[str, str], LocatedMap] = field(default_factory=dict)

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


def assemble(layers: Sequence[Layer]) -> Draft:
    """The entries of all layers, judged. Problems are collected, not raised."""
    draft = Draft()
    for layer in layers:
        added: set[tuple[str, str]] = set()
        for document in layer.documents:
            _add_document(draft, document, layer.name, added)
    _judge_entries(draft)
    _check_references(draft)
    _check_pci_ids(draft)
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
    draft.raws[key] = raw if earlier is None else _merged(earlier, raw)
    draft.origins[key] = layer
    added.add(key)


_SHOWN = 80


def _merged(base: LocatedMap, over: LocatedMap) -> LocatedMap:
    """`base` with the keys of `over`; groups of rates and flags are merged name by name."""
    merged = LocatedMap(over.place)
    for part in (base, over):
        for key, value in part.items():
            if key in _GROUP_LISTS and isinstance(merged.get(key), LocatedList):
                merged[key] = _merged_groups(merged[key], value)
            else:
                merged[key] = value
            merged.places[key] = part.places[key]
    return merged


def _merged_groups(base: LocatedList, over: Any) -> Any:
    """The groups of `over`, and what is left of those of `base` without the same names."""
    if not isinstance(over, LocatedList):
        return over
    named = {
        name
        for group in over
        if isinstance(group, LocatedMap) and isinstance(group.get("values"), LocatedMap)
        for name in group["values"]
    }
    merged = LocatedList(over.place)
    for index, group in enumerate(base):
        kept = group
        if isinstance(group, LocatedMap) and isinstance(group.get("values"), LocatedMap):
            kept = _without(group, named)
        if kept is not None:
            merged.append(kept)
            merged.places.append(base.places[index])
    merged.extend(over)
    merged.places.extend(over.places)
    return merged


def _without(group: LocatedMap, names: set[str]) -> LocatedMap | None:
    values = LocatedMap(group["values"].place)
    for name, value in group["values"].items():
        if name not in names:
            values[name] = value
            values.places[name] = group["values"].places[name]
    if not values:
        return None
    kept = LocatedMap(group.place)
    kept.update(group)
    kept.places = group.places
    kept["values"] = values
    return kept


def _judge_entries(draft: Draft) -> None:
    for (section, name), raw in list(draft.raws.items()):
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
            draft.links.append(entry)
        _check_sources(draft, entry, raw, section, name)


def _check_sources(draft: Draft, entry: Entry, raw: Any, section: str, name: str) -> None:
    """Every `source` below an entry names a known source."""
    pending: list[tuple[Any, Any, str]] = [(entry, raw, "")]
    while pending:
        value, part, path = pending.pop()
        if isinstance(value, list):
            for index, item in enumerate(value):
                inner = part[index] if isinstance(part, LocatedList) else None
                pending.append((item, inner, f"{path}.{index}"))
        elif isinstance(value, Entry):
            for key in type(value).model_fields:
                inner = part.get(key) if isinstance(part, LocatedMap) else None
                if inner is not None:
                    pending.append((getattr(value, key), inner, f"{path}.{key}"))
            if isinstance(value, Sourced) and isinstance(part, LocatedMap):
                for source in value.source:
                    if source not in draft.sources:
                        place = part.places["source"]
                        key = section if section == "links" else f"{section}.{name}"
                        _dangling(draft, place, f"{key}{path}.source", source, draft.sources)


def _dangling(draft: Draft, place: Place, key: str, name: str, known: Any) -> None:
    kind = key.rsplit(".", 1)[-1]
    required = f"a known {kind.replace('shared_with', 'family')}"
    found = f"{name!r}, which no file has"
    draft.problems.append(refusal(place, key, required, found, did_you_mean(name, known)))


def _check_references(draft: Draft) -> None:
    judged = {name for kind, name in draft.raws if kind == "families"}
    architectures = {name for kind, name in draft.raws if kind == "architectures"}
    devices = {name for kind, name in draft.raws if kind == "devices"}
    for name, architecture in draft.architectures.items():
        for key, families in (
            ("family", [architecture.family]),
            ("shared_with", architecture.shared_with),
        ):
            for family in families:
                if family not in judged:
                    place = draft.place("architectures", name, key)
                    _dangling(draft, place, f"architectures.{name}.{key}", family, judged)
    for name, device in draft.devices.items():
        if device.family not in judged:
            place = draft.place("devices", name, "family")
            _dangling(draft, place, f"devices.{name}.family", device.family, judged)
        if device.arch not in architectures:
            place = draft.place("devices", name, "arch")
            _dangling(draft, place, f"devices.{name}.arch", device.arch, architectures)
        _check_arch_family(draft, name, device)
    for (kind, name), raw in draft.raws.items():
        if kind == "links" and isinstance(raw.get("device"), str) and raw["device"] not in devices:
            _dangling(draft, raw.places["device"], "links.device", raw["device"], devices)


def _check_arch_family(draft: Draft, name: str, device: DeviceEntry) -> None:
    architecture = draft.architectures.get(device.arch)
    if architecture is None:
        return
    families = [architecture.family, *architecture.shared_with]
    if device.family not in families:
        place = draft.place("devices", name, "arch")
        required = f"an architecture of the family {device.family!r}"
        found = f"{device.arch!r}, which is of {' and '.join(families)}"
        remedy = "correct `arch` or `family`, or add the family to the architecture's `shared_with`"
        draft.problems.append(refusal(place, f"devices.{name}.arch", required, found, remedy))


def _check_pci_ids(draft: Draft) -> None:
    owners: dict[tuple[str, str, str | None], tuple[str, bool]] = {}
    for name, device in draft.devices.items():
        family = draft.families.get(device.family)
        if family is None:
            continue
        key = f"devices.{name}.identity.pci_devices"
        place = draft.place("devices", name, "identity", "pci_devices")
        if family.pci_vendor is None and device.identity.pci_devices:
            required = f"a `pci_vendor` of the family {family.id!r} for PCI device ids"
            draft.problems.append(refusal(place, key, required, "null", "set it in the family"))
            continue
        for pci in device.identity.pci_devices:
            identity = (str(family.pci_vendor), pci.id, pci.subsystem)
            is_told_apart = pci.told_apart_by is not None
            rival = owners.setdefault(identity, (name, is_told_apart))
            if (rival[0] == name and rival != (name, is_told_apart)) or (
                rival[0] != name and not (is_told_apart or rival[1])
            ):
                required = "a PCI id of one device, or `subsystem` or `told_apart_by`"
                found = f"{pci.id}, which {rival[0]!r} has as well"
                remedy = "remove it, or state how the two are told apart"
                draft.problems.append(refusal(place, key, required, found, remedy))
