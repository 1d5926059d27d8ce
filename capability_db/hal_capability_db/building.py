"""Makes what the database answers with from the judged entries of the files.

Here a device inherits from its architecture, a card's figure becomes a torch device's, and every
unit becomes its base unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from hal_capability_db.assembly import Draft
from hal_capability_db.database import Database
from hal_capability_db.profiles import (
    Architecture,
    CollectiveLibrary,
    DetectionRules,
    DeviceProfile,
    FamilyProfile,
    Group,
    LinkMeasurement,
    PciDevice,
    Serving,
    Tell,
    TritonSupport,
)
from hal_capability_db.schema import (
    ArchitectureEntry,
    DetectionEntry,
    DeviceEntry,
    FamilyEntry,
    LinkEntry,
    PciEntry,
    TellEntry,
)
from hal_capability_db.schema_facts import (
    DtypesEntry,
    MeasuredEntry,
    QuantityEntry,
    RatesEntry,
    Sourced,
)
from hal_capability_db.values import UNITS, Fact, unknown

T = TypeVar("T")


def build(draft: Draft, overlays: tuple[str, ...]) -> Database:
    """The database of a draft without problems."""
    architectures = {
        name: _architecture(entry, draft.origins["architectures", name])
        for name, entry in sorted(draft.architectures.items())
    }
    return Database(
        devices={
            name: _device(entry, architectures[entry.arch], draft.origins["devices", name])
            for name, entry in sorted(draft.devices.items())
        },
        families={
            name: _family(entry, draft.origins["families", name])
            for name, entry in sorted(draft.families.items())
        },
        architectures=architectures,
        links=tuple(point for entry in draft.links.values() for point in _links(entry)),
        sources=dict(sorted(draft.sources.items())),
        overlays=overlays,
    )


def _group(entry: Sourced) -> Group:
    return Group(source=tuple(entry.source), confidence=entry.confidence, note=entry.note)


def _fact(entry: Sourced | None) -> Fact[Any]:
    """The fact of an entry with a plain `value`."""
    if entry is None:
        return unknown()
    value: Any = getattr(entry, "value")  # noqa: B009  -- every caller's entry has one
    return Fact(value, "", tuple(entry.source), entry.confidence, entry.note)


def _dtypes(entry: DtypesEntry | None) -> Fact[frozenset[str]]:
    if entry is None:
        return unknown()
    value = None if entry.value is None else frozenset(map(str, entry.value))
    return Fact(value, "", tuple(entry.source), entry.confidence, entry.note)


def _quantity(entry: QuantityEntry | None, per_card: int = 1) -> Fact[float]:
    if entry is None:
        return unknown()
    return _based(entry, entry.value, entry.unit, per_card if entry.per == "card" else 1)


def _bytes(entry: QuantityEntry | None, per_card: int = 1) -> Fact[int]:
    fact = _quantity(entry, per_card)
    value = None if fact.value is None else round(fact.value)
    return Fact(value, fact.unit, fact.source, fact.confidence, fact.note)


def _based(entry: Sourced, value: float | None, unit: str, share: int = 1) -> Fact[float]:
    known = UNITS[unit]
    based = None if value is None else value * known.factor / share
    note = entry.note
    if share > 1 and value is not None:
        of_card = f"{value:g} {unit} of a card of {share} devices"
        note = "; ".join(part for part in (note, of_card) if part)
    return Fact(based, known.base, tuple(entry.source), entry.confidence, note)


def _rates(
    groups: Iterable[RatesEntry | MeasuredEntry], per_card: int
) -> Mapping[str, Fact[float]]:
    return {
        name: _based(group, value, group.unit, per_card if group.per == "card" else 1)
        for group in groups
        for name, value in group.values.items()
    }


def _architecture(entry: ArchitectureEntry, origin: str) -> Architecture:
    flags: dict[str, Fact[bool]] = {
        name: Fact(value, "", tuple(group.source), group.confidence, group.note)
        for group in entry.flags
        for name, value in group.values.items()
    }
    return Architecture(
        id=entry.id,
        family=entry.family,
        shared_with=tuple(entry.shared_with),
        name=entry.name,
        matrix_dtypes=_dtypes(entry.matrix_dtypes),
        unverified_matrix_dtypes=_dtypes(entry.unverified_matrix_dtypes),
        absent_matrix_dtypes=_dtypes(entry.absent_matrix_dtypes),
        warp_size=_fact(entry.warp_size),
        shared_memory_per_block_bytes=_bytes(entry.shared_memory_per_block),
        tma=flags.get("tma", unknown()),
        multicast=flags.get("multicast", unknown()),
        wgmma=flags.get("wgmma", unknown()),
        tcgen05=flags.get("tcgen05", unknown()),
        graph_capture=flags.get("graph_capture", unknown()),
        triton_target=_fact(entry.triton_target),
        accumulation=tuple(_fact(note) for note in entry.accumulation),
        notes=entry.notes,
        origin=origin,
    )


def _device(entry: DeviceEntry, arch: Architecture, origin: str) -> DeviceProfile:
    per_card = entry.torch_devices_per_card
    own_dtypes, own_claims = entry.matrix_dtypes, entry.unverified_matrix_dtypes
    own_shared = entry.shared_memory_per_block
    return DeviceProfile(
        id=entry.id,
        family=entry.family,
        name=entry.name,
        arch=entry.arch,
        identity=_group(entry.identity),
        pci_devices=tuple(map(_pci, entry.identity.pci_devices)),
        names=tuple(entry.identity.names),
        compute_capability=entry.identity.compute_capability,
        torch_devices_per_card=per_card,
        matrix_dtypes=_dtypes(own_dtypes) if own_dtypes else arch.matrix_dtypes,
        unverified_matrix_dtypes=(
            _dtypes(own_claims) if own_claims else arch.unverified_matrix_dtypes
        ),
        peak=_rates(entry.peak, per_card),
        measured=_rates(entry.measured, per_card),
        memory_bytes=_bytes(entry.memory, per_card),
        usable_memory_bytes=_bytes(entry.usable_memory, per_card),
        memory_type=_fact(entry.memory_type),
        memory_bandwidth=_quantity(entry.memory_bandwidth, per_card),
        host_link=_fact(entry.host_link),
        host_link_bytes_per_s=_quantity(entry.host_link_bandwidth, per_card),
        fabric=_fact(entry.fabric),
        fabric_bytes_per_s=_quantity(entry.fabric_bandwidth, per_card),
        fabric_group=_fact(entry.fabric_group),
        p2p=_fact(entry.p2p),
        warp_size=_fact(entry.warp_size) if entry.warp_size else arch.warp_size,
        compute_units=_fact(entry.compute_units),
        shared_memory_per_block_bytes=(
            _bytes(own_shared) if own_shared else arch.shared_memory_per_block_bytes
        ),
        notes=entry.notes,
        origin=origin,
    )


def _pci(entry: PciEntry) -> PciDevice:
    return PciDevice(
        id=entry.id,
        subsystem=entry.subsystem,
        variant=entry.variant or "",
        has_same_figures=entry.variant is None or entry.has_same_figures,
        told_apart_by=entry.told_apart_by or "",
    )


def _tells(entries: Iterable[TellEntry]) -> tuple[Tell, ...]:
    return tuple(Tell(kind=entry.kind, value=entry.value, note=entry.note) for entry in entries)


def _detection(entry: DetectionEntry) -> DetectionRules:
    return DetectionRules(
        group=_group(entry),
        is_available=entry.is_available,
        tells=_tells(entry.tells),
        excluded_by=_tells(entry.excluded_by),
        pci_classes=tuple(entry.pci_classes),
        commands=tuple(entry.commands),
        libraries=tuple(entry.libraries),
        visible_devices_variables=tuple(entry.visible_devices_variables),
        container_variables=tuple(entry.container_variables),
        device_nodes=tuple(entry.device_nodes),
        dispatch_key=entry.dispatch_key or "",
        masquerades_as=entry.masquerades_as or "",
        reported=dict(entry.reported),
        model_numbers=dict(entry.model_numbers),
        traps=tuple(entry.traps),
    )


def _family(entry: FamilyEntry, origin: str) -> FamilyProfile:
    collectives, triton, serving = entry.collectives, entry.triton, entry.serving
    return FamilyProfile(
        id=entry.id,
        vendor=entry.vendor,
        name=entry.name,
        pci_vendor=entry.pci_vendor,
        torch_device=entry.torch_device,
        torch_module=entry.torch_module,
        detection=_detection(entry.detection),
        collectives=CollectiveLibrary(
            group=_group(collectives),
            name=collectives.library,
            torch_backend=collectives.torch_backend,
            variables=tuple(collectives.variables),
        ),
        triton=TritonSupport(
            group=_group(triton),
            works=triton.works,
            target=triton.target or "",
            packages=tuple(triton.packages),
            warp=triton.warp,
            traps=tuple(triton.traps),
        ),
        serving=Serving(
            group=_group(serving), stacks=dict(serving.stacks), forced=tuple(serving.forced)
        ),
        environment=dict(entry.environment),
        origin=origin,
    )


def _links(entry: LinkEntry) -> Iterable[LinkMeasurement]:
    for message, by_world in entry.points.items():
        for world_size, value in by_world.items():
            yield LinkMeasurement(
                device=entry.device,
                metric=entry.metric,
                implementation=entry.implementation,
                world_size=int(world_size),
                message_bytes=None if message == "any" else int(message),
                value=_based(entry, value, entry.unit),
            )
