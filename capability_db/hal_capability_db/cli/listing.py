"""`hal db list`: what the database holds, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from hal.cli.output import print_json, print_text
from hal_capability_db.cli.context import database_of
from hal_capability_db.cli.tables import UNVERIFIED_MARK, Column, Heading, Row, print_rows
from hal_capability_db.database import Database
from hal_capability_db.facts import link_name
from hal_capability_db.loader import BUILT_IN
from hal_capability_db.profiles import DeviceProfile
from hal_capability_db.quantities import value_text
from hal_capability_db.values import Fact

_LEGEND = (
    "? is unverified: shown, and never a reason for behaviour. Empty: not public. Rates are dense "
    "TFLOPS of one torch device, as stated; what was measured: hal db show DEVICE."
)


class Section(StrEnum):
    """What can be listed."""

    DEVICES = "devices"
    FAMILIES = "families"
    ARCHITECTURES = "architectures"
    LINKS = "links"
    SOURCES = "sources"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("list")(_list)


def _list(
    ctx: typer.Context,
    section: Annotated[Section, typer.Argument(help="What to list.")] = Section.DEVICES,
    family: Annotated[str, typer.Option(help="Only of this family.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The devices, families, architectures, links or sources that the database knows."""
    database = database_of(ctx)
    if family:
        database.family(family)
    listing = _MAKERS[section](database, family)
    if as_json:
        print_json(listing.document())
        return
    print_rows(listing.columns, listing.lines())
    if section in (Section.DEVICES, Section.ARCHITECTURES):
        print_text(_LEGEND)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that belong to one family or device: its id, its heading in the table."""

    id: str
    heading: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Listing:
    """A table in groups; `grouped_by` is what the groups are, empty if there is one only."""

    columns: Sequence[Column]
    groups: Sequence[Group]
    grouped_by: str = ""

    def lines(self) -> Iterable[Row]:
        """The rows under their headings; groups without rows left out."""
        for group in self.groups:
            if group.heading and group.rows:
                yield Heading(group.heading)
            yield from group.rows

    def document(self) -> list[dict[str, str]]:
        """The rows for JSON."""
        titles = [column.title for column in self.columns]
        return [
            ({self.grouped_by: group.id} if self.grouped_by else {})
            | dict(zip(titles, row, strict=True))
            for group in self.groups
            for row in group.rows
        ]


def _short(fact: Fact[Any] | None) -> str:
    if fact is None or not fact.is_known:
        return ""
    return _marked(value_text(fact.value, fact.unit), fact)


def _scaled(fact: Fact[Any] | None, factor: float) -> str:
    if fact is None or fact.value is None:
        return ""
    return _marked(f"{fact.value / factor:.4g}", fact)


def _marked(text: str, fact: Fact[Any]) -> str:
    return text if fact.is_verified else text + UNVERIFIED_MARK


def _rate(device: DeviceProfile, *dtypes: str) -> str:
    found = [device.peak[dtype] for dtype in dtypes if dtype in device.peak]
    return _scaled(found[0], 1e12) if found else ""


def _devices(database: Database, family: str) -> Listing:
    columns: list[Column] = [
        Column("device", is_fixed=True),
        Column("arch", is_fixed=True),
        Column("memory", is_number=True),
        Column("GB/s", is_number=True),
        Column("BF16", is_number=True),
        Column("FP8", is_number=True),
        Column("from"),
    ]
    groups: list[Group] = []
    for item in database.families.values():
        if family not in ("", item.id):
            continue
        rows = [
            (
                device.id,
                device.arch,
                _short(device.memory_bytes),
                _scaled(device.memory_bandwidth, 1e9),
                _rate(device, "bfloat16"),
                _rate(device, "fp8", "mxfp8"),
                "" if device.origin == BUILT_IN else device.origin,
            )
            for device in database.devices.values()
            if device.family == item.id
        ]
        groups.append(Group(item.id, f"{item.name} ({item.id})", rows))
    return _without_origin(columns, groups)


def _without_origin(columns: list[Column], groups: list[Group]) -> Listing:
    """The column `from` matters only where an overlay has added or changed something."""
    if any(row[-1] for group in groups for row in group.rows):
        return Listing(columns, groups, "family")
    shorter = [replace(group, rows=[row[:-1] for row in group.rows]) for group in groups]
    return Listing(columns[:-1], shorter, "family")


def _families(database: Database, family: str) -> Listing:
    columns = (
        Column("family", is_fixed=True),
        Column("vendor"),
        Column("PCI", is_fixed=True),
        Column("torch", is_fixed=True),
        Column("looks like"),
        Column("collectives"),
        Column("triton"),
        Column("devices", is_number=True),
    )
    rows = [
        (
            item.id,
            item.vendor,
            item.pci_vendor or "",
            item.torch_device,
            item.detection.masquerades_as,
            f"{item.collectives.name}, {item.collectives.torch_backend or 'name not confirmed'}",
            item.triton.target,
            str(sum(device.family == item.id for device in database.devices.values())),
        )
        for item in database.families.values()
        if family in ("", item.id)
    ]
    return Listing(columns, [Group("", "", rows)])


def _architectures(database: Database, family: str) -> Listing:
    columns = (
        Column("arch", is_fixed=True),
        Column("warp", is_number=True),
        Column("shared", is_number=True),
        Column("FP8", is_fixed=True),
        Column("matrix units multiply"),
    )
    groups: list[Group] = []
    for owner in database.families.values():
        rows = [
            (
                item.id,
                _short(item.warp_size),
                _short(item.shared_memory_per_block_bytes),
                _short(item.fp8_kind),
                "; ".join(
                    filter(None, map(_short, (item.matrix_dtypes, item.unverified_matrix_dtypes)))
                ),
            )
            for item in database.architectures.values()
            if owner.id == item.family and family in ("", item.family, *item.shared_with)
        ]
        groups.append(Group(owner.id, f"{owner.name} ({owner.id})", rows))
    return Listing(columns, groups, "family")


def _links(database: Database, family: str) -> Listing:
    columns = (
        Column("what"),
        Column("by"),
        Column("message", is_number=True),
        Column("devices", is_number=True),
        Column("value", is_number=True, is_fixed=True),
    )
    groups: list[Group] = []
    for device in database.devices.values():
        points = [link for link in database.links if link.device == device.id]
        rows = [
            (
                link.metric.replace("_", " "),
                link.implementation,
                "any" if link.message_bytes is None else value_text(link.message_bytes, "B"),
                str(link.world_size),
                _short(link.value),
            )
            for link in sorted(points, key=lambda link: (link.metric, link_name(link)))
            if family in ("", device.family)
        ]
        groups.append(Group(device.id, device.id, rows))
    return Listing(columns, groups, "device")


def _sources(database: Database, family: str) -> Listing:
    columns = (Column("source", is_fixed=True), Column("what it is"))
    return Listing(columns, [Group("", "", list(database.sources.items()))])


_MAKERS: dict[Section, Callable[[Database, str], Listing]] = {
    Section.DEVICES: _devices,
    Section.FAMILIES: _families,
    Section.ARCHITECTURES: _architectures,
    Section.LINKS: _links,
    Section.SOURCES: _sources,
}
