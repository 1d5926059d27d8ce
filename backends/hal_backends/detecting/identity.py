"""Which product of the capability database a card is: by PCI id, by the names it reports, by what
the kernel says of it. Loaded only when a card of the family is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hal.errors import DetectionError
from hal.host import HostProbe
from hal_backends.detecting.rules import FamilyRules, Sighting
from hal_backends.detecting.survey import Card
from hal_capability_db import Database, DeviceProfile

_MEMORY_TOLERANCE = 0.1  # GB or GiB, what firmware keeps: 7 % and a bit


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a card is. profile: None where no product of the database is certain.

    arch: an architecture of the database, "" if even that is not known. basis: what decided.
    details: what the kernel and the tool say of the card, see `FamilyRules.refine`.
    """

    profile: DeviceProfile | None
    arch: str
    name: str
    basis: str
    details: Mapping[str, str] = field(default_factory=dict)


def identify(host: HostProbe, rules: FamilyRules, card: Card, database: Database) -> Identity:
    """The card's product, or its architecture, or at least its name.

    Raises:
        DetectionError: its PCI id, its names or its architecture belong to different products.
    """
    sighting = card.sighting
    details = rules.refine(host, sighting) if rules.refine else {}
    names = _names(sighting, details)
    by_pci = (
        database.by_pci(
            rules.pci_vendor, sighting.function.device, sighting.function.subsystem or None
        )
        if sighting.function.device
        else ()
    )
    by_pci = tuple(profile for profile in by_pci if profile.family == rules.family)
    by_name = {p.id: p for name in names for p in _named(rules, name, database)}
    profile, basis = _product(rules, sighting, by_pci, by_name, names, _memory(sighting, details))
    arch = profile.arch if profile is not None else _shared_arch(by_pci, by_name)
    arch = _checked_arch(rules, sighting, arch, details.get("arch", ""), database)
    name = profile.name if profile is not None else (names[0] if names else "")
    name = name or f"{rules.hardware} {sighting.function.id}"
    return Identity(profile=profile, arch=arch, name=name, basis=basis, details=details)


def _named(rules: FamilyRules, name: str, database: Database) -> Sequence[DeviceProfile]:
    """The products that report a name, or that have it: `refine` may know the product itself."""
    reported = database.by_name(rules.family, name)
    return reported or [
        profile
        for profile in database.devices.values()
        if profile.family == rules.family and profile.name == name
    ]


def _names(sighting: Sighting, details: Mapping[str, str]) -> list[str]:
    """Every name that the card is given, most telling first."""
    tool = sighting.tool.name if sighting.tool is not None else ""
    names = [details.get("name", ""), tool, sighting.torch_name]
    return list(dict.fromkeys(name for name in names if name))


def _memory(sighting: Sighting, details: Mapping[str, str]) -> int:
    if "memory_bytes" in details:
        return int(details["memory_bytes"])
    return sighting.tool.memory_bytes if sighting.tool is not None else 0


def _product(
    rules: FamilyRules,
    sighting: Sighting,
    by_pci: Sequence[DeviceProfile],
    by_name: Mapping[str, DeviceProfile],
    names: Sequence[str],
    memory_bytes: int,
) -> tuple[DeviceProfile | None, str]:
    function = sighting.function
    if by_pci and by_name:
        # The product as such, not the variant that the PCI id may stand for: its name says so.
        both = [by_name[profile.id] for profile in by_pci if profile.id in by_name]
        if not both:
            raise DetectionError(
                f"{rules.hardware} {function.address}",
                "a PCI id and a name of one product",
                f"PCI says {_ids(by_pci)} ({function.id}), its name says "
                f"{_ids(list(by_name.values()))} ({names[0]!r})",
                "check the tool and the driver; an overlay of the capability database can correct "
                "what it says of either",
            )
        return _one_of(both, memory_bytes, f"PCI id {function.id} and name {names[0]!r}")
    if by_pci:
        certain = [p for p in by_pci if not _is_shared(p, function.device)]
        if len(by_pci) == 1 and certain:
            return certain[0], f"PCI id {function.id}"
        if any(name for name in names):
            # The id has several products, and this one's name is none that we know.
            return None, f"PCI id {function.id} of several products, name {names[0]!r} of none"
        return _one_of(list(by_pci), memory_bytes, f"PCI id {function.id}", is_shared=True)
    return _one_of(list(by_name.values()), memory_bytes, f"name {names[0]!r}" if names else "")


def _one_of(
    profiles: Sequence[DeviceProfile], memory_bytes: int, basis: str, *, is_shared: bool = False
) -> tuple[DeviceProfile | None, str]:
    """The only one, or the only one with that memory."""
    if len(profiles) == 1 and not is_shared:
        return profiles[0], basis
    fitting = [p for p in profiles if memory_bytes and _has_memory(p, memory_bytes)]
    if len(fitting) == 1:
        return fitting[0], f"{basis} and {memory_bytes >> 30} GiB of memory"
    return None, f"{basis} of several products" if profiles else f"{basis} of no known product"


def _has_memory(profile: DeviceProfile, memory_bytes: int) -> bool:
    stated = profile.usable_memory_bytes.value or profile.memory_bytes.value
    return stated is not None and abs(stated - memory_bytes) <= _MEMORY_TOLERANCE * stated


def _is_shared(profile: DeviceProfile, device: str) -> bool:
    return any(pci.id == device and pci.told_apart_by for pci in profile.pci_devices)


def _shared_arch(by_pci: Sequence[DeviceProfile], by_name: Mapping[str, DeviceProfile]) -> str:
    archs = {profile.arch for profile in (*by_pci, *by_name.values())}
    return archs.pop() if len(archs) == 1 else ""


def _checked_arch(
    rules: FamilyRules, sighting: Sighting, of_product: str, reported: str, database: Database
) -> str:
    """The architecture, if the product's and the driver's agree and the database knows it."""
    if reported and of_product and reported != of_product:
        raise DetectionError(
            f"{rules.hardware} {sighting.function.address}",
            "a product and a driver that name one architecture",
            f"PCI id {sighting.function.id} is that of {of_product}, the driver says {reported}",
            "update the driver; if both are right, an overlay of the capability database "
            "can correct the product",
        )
    arch = reported or of_product
    return arch if arch in database.architectures else ""


def _ids(profiles: Sequence[DeviceProfile]) -> str:
    return " or ".join(profile.id for profile in profiles)
