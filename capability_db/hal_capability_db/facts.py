"""Every fact of an entry under one dotted name: what `hal db` shows, compares and documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hal_capability_db.database import Database
from hal_capability_db.profiles import (
    Architecture,
    DeviceProfile,
    FamilyProfile,
    Group,
    LinkMeasurement,
    PciDevice,
    Tell,
)
from hal_capability_db.values import Fact

_HIDDEN = ("id", "origin", "group", "identity")
Entity = DeviceProfile | FamilyProfile | Architecture


def entry_facts(entry: Entity) -> dict[str, Fact[Any]]:
    """The facts of an entry by dotted name, in the order of its fields; empty ones left out.

    A value that stands in a sourced group carries the group's source and confidence.
    """
    identity = entry.identity if isinstance(entry, DeviceProfile) else None
    facts = dict(_walk(entry, "", None))
    if identity is not None:
        for name in ("pci_devices", "names", "compute_capability"):
            if name in facts:
                facts[name] = _in_group(facts[name].value, identity)
    return {name: fact for name, fact in facts.items() if fact.value not in ((), "", None)}


def database_facts(database: Database) -> dict[str, Fact[Any]]:
    """The facts of a whole database: `devices.ID.NAME`, `links.DEVICE.…`, `sources.ID`."""
    facts: dict[str, Fact[Any]] = {}
    for section in ("families", "architectures", "devices"):
        entries: Mapping[str, Entity] = getattr(database, section)
        for name, entry in entries.items():
            facts[f"{section}.{name}"] = Fact(entry.name)
            for key, fact in entry_facts(entry).items():
                facts[f"{section}.{name}.{key}"] = fact
    for link in database.links:
        facts[f"links.{link_name(link)}"] = link.value
    for name, text in database.sources.items():
        facts[f"sources.{name}"] = Fact(text)
    return facts


def link_name(link: LinkMeasurement) -> str:
    """A name of a measurement that no other has."""
    size = "any" if link.message_bytes is None else str(link.message_bytes)
    return f"{link.device}.{link.metric}.{link.implementation}.{size} B.x{link.world_size}"


def _walk(value: Any, name: str, group: Group | None) -> Iterator[tuple[str, Fact[Any]]]:
    if isinstance(value, Fact):
        yield name, value
    elif isinstance(value, PciDevice | Tell):
        yield name, _in_group(_line(value), group)
    elif dataclasses.is_dataclass(value):
        inner = getattr(value, "group", group)
        for field in dataclasses.fields(value):
            if field.name not in _HIDDEN:
                dotted = f"{name}.{field.name}" if name else field.name
                yield from _walk(getattr(value, field.name), dotted, inner)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{name}.{key}", group)
    elif isinstance(value, tuple) and value and isinstance(value[0], Fact):
        for index, item in enumerate(value):
            yield f"{name}.{index}", item
    elif isinstance(value, tuple):
        lines = tuple(_line(item) if isinstance(item, PciDevice | Tell) else item for item in value)
        yield name, _in_group(lines, group)
    else:
        yield name, _in_group(value, group)


def _in_group(value: Any, group: Group | None) -> Fact[Any]:
    if group is None:
        return Fact(value)
    return Fact(value, "", group.source, group.confidence, group.note)


def _line(value: PciDevice | Tell) -> str:
    """A PCI id or a sign of a family on one line."""
    if isinstance(value, Tell):
        return f"{value.kind} {value.value}" + (f" ({value.note})" if value.note else "")
    parts = [value.subsystem or "", value.variant]
    if value.variant and not value.has_same_figures:
        parts.append("other figures")
    if value.told_apart_by:
        parts.append(f"shared, told apart by {value.told_apart_by}")
    rest = ", ".join(filter(None, parts))
    return f"{value.id} ({rest})" if rest else value.id
