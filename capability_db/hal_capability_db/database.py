"""The database in memory, and how a device is looked up: by id, PCI id or reported name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hal.suggestions import did_you_mean
from hal_capability_db.errors import DatabaseError
from hal_capability_db.profiles import (
    Architecture,
    DeviceProfile,
    FamilyProfile,
    LinkMeasurement,
    PciDevice,
)
from hal_capability_db.values import Fact

T = TypeVar("T")
_FIGURES = (
    "memory_bytes",
    "usable_memory_bytes",
    "memory_type",
    "memory_bandwidth",
    "host_link",
    "host_link_bytes_per_s",
    "fabric",
    "fabric_bytes_per_s",
    "fabric_group",
    "p2p",
)


@dataclass(frozen=True, kw_only=True)
class Database:
    """Every device, family and architecture that is known. sources: id -> what it is."""

    devices: Mapping[str, DeviceProfile]
    families: Mapping[str, FamilyProfile]
    architectures: Mapping[str, Architecture]
    links: tuple[LinkMeasurement, ...]
    sources: Mapping[str, str]
    overlays: tuple[str, ...] = ()
    _by_pci: dict[tuple[str, str], list[tuple[PciDevice, DeviceProfile]]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for profile in self.devices.values():
            vendor = self.families[profile.family].pci_vendor
            for pci in profile.pci_devices:
                self._by_pci.setdefault((str(vendor), pci.id), []).append((pci, profile))

    def device(self, name: str) -> DeviceProfile:
        """The device of an id.

        Raises:
            DatabaseError: there is none; with the nearest id.
        """
        return _of(self.devices, name, "device")

    def family(self, name: str) -> FamilyProfile:
        """The family of an id. Raises DatabaseError if there is none."""
        return _of(self.families, name, "family")

    def architecture(self, name: str) -> Architecture:
        """The architecture of an id. Raises DatabaseError if there is none."""
        return _of(self.architectures, name, "architecture")

    def by_pci(
        self, vendor: str, device: str, subsystem: str | None = None
    ) -> tuple[DeviceProfile, ...]:
        """The devices with a PCI id, sorted by id; several where the id does not decide.

        A variant whose figures may differ comes back under the variant's name with its figures
        unverified.

        Args:
            vendor, device: "0x10de", "0x2bb5"; case and `0x` do not matter.
            subsystem: "0xVVVV:0xDDDD", where known.
        """
        found = self._by_pci.get((_hex(vendor), _hex(device)), [])
        wanted = None if subsystem is None else ":".join(map(_hex, subsystem.split(":")))
        exact = [pair for pair in found if pair[0].subsystem == wanted and wanted is not None]
        chosen = exact or [pair for pair in found if pair[0].subsystem is None]
        if wanted is None:
            chosen = found
        profiles = {profile.id: _as_variant(pci, profile) for pci, profile in chosen}
        return tuple(profiles[name] for name in sorted(profiles))

    def by_name(self, family: str, name: str) -> tuple[DeviceProfile, ...]:
        """The devices of a family that report this name: the whole name, case and spaces aside.

        A part of a name never matches: "NVIDIA H200" is not "NVIDIA H200 NVL".
        """
        wanted = _folded(name)
        return tuple(
            profile
            for _, profile in sorted(self.devices.items())
            if profile.family == family and wanted in map(_folded, profile.names)
        )


def _of(entries: Mapping[str, T], name: str, kind: str) -> T:
    if name not in entries:
        raise DatabaseError(
            f"{kind} {name[:80]!r}",
            f"a {kind} of the capability database",
            "none of that id",
            did_you_mean(name, entries),
        )
    return entries[name]


def _hex(text: str) -> str:
    return f"0x{text.strip().lower().removeprefix('0x').rjust(4, '0')}"


def _folded(name: str) -> str:
    return " ".join(name.split()).casefold()


def _as_variant(pci: PciDevice, profile: DeviceProfile) -> DeviceProfile:
    if not pci.variant:
        return profile
    name = f"{profile.name} ({pci.variant})"
    if pci.has_same_figures:
        return replace(profile, name=name)
    note = f"figure of {profile.name}; this is its variant {pci.variant}"

    def doubted(fact: Fact[T]) -> Fact[T]:
        if fact.value is None:
            return fact
        return replace(
            fact, confidence="unverified", note="; ".join(filter(None, (fact.note, note)))
        )

    changed: dict[str, Fact[object]] = {key: doubted(getattr(profile, key)) for key in _FIGURES}
    rates = {dtype: doubted(fact) for dtype, fact in profile.peak.items()}
    return replace(profile, name=name, peak=rates, measured={}, **changed)  # type: ignore[arg-type]
