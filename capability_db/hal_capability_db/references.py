"""Judges a database as a whole: every id that is named exists, no PCI id has two owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hal.suggestions import did_you_mean
from hal_capability_db.assembly import Draft
from hal_capability_db.located import LocatedList, LocatedMap, Place, refusal
from hal_capability_db.schema import DeviceEntry
from hal_capability_db.schema_facts import Entry, Sourced


def check_references(draft: Draft, base: Draft | None = None) -> None:
    """Add every dangling reference and every PCI id of two devices to the draft's problems.

    Args:
        base: what the draft was made over, whose own entries have been checked.
    """
    known = {} if base is None else base.raws
    sections: Mapping[str, Mapping[str, Entry]] = {
        "families": draft.families,
        "architectures": draft.architectures,
        "devices": draft.devices,
        "links": draft.links,
    }
    for section, entries in sections.items():
        for name, entry in entries.items():
            raw = draft.raws[section, name]
            if known.get((section, name)) is not raw:
                _check_sources(draft, entry, raw, section, name)
    _check_ids(draft)
    _check_pci_ids(draft)


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


def _check_ids(draft: Draft) -> None:
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
    for (kind, _), raw in draft.raws.items():
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
