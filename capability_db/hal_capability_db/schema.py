"""What a database file may say: one pydantic model per kind of entry, unknown keys refused.

The models judge one entry by itself. What needs the whole database (references, duplicates,
overlays) is judged in `references.py` and `assembly.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from hal_capability_db.schema_facts import (
    CountEntry,
    DtypesEntry,
    Entry,
    FabricEntry,
    FlagsEntry,
    Id,
    MeasuredEntry,
    Name,
    Pattern,
    PciId,
    PeerEntry,
    QuantityEntry,
    RatesEntry,
    Sourced,
    Subsystem,
    Text,
    TextEntry,
    TritonTargetEntry,
    check_quantity,
    fault,
    require_distinct,
    require_unit,
    require_unverified,
)

SCHEMA = "halstack.capability_db/1"


class Overriding(Entry):
    """An entry that an overlay may change: `overrides: true` states that it means to."""

    overrides: bool = Field(default=False, description="true: change the entry of that id")


class PciEntry(Entry):
    """A PCI device id of a product."""

    id: PciId = Field(description="0x and four hexadecimal digits, lower case")
    subsystem: Subsystem | None = Field(default=None, description="0xVVVV:0xDDDD, to tell apart")
    variant: Name | None = Field(default=None, description="which variant of the product")
    has_same_figures: bool = Field(
        default=False, description="true: the variant's figures are the product's"
    )
    told_apart_by: Literal["name", "memory"] | None = Field(
        default=None, description="where several products have the id: how to tell them apart"
    )


class IdentityEntry(Sourced):
    """How a device says what it is."""

    pci_devices: list[PciEntry] = Field(default_factory=list, description="its PCI device ids")
    names: list[Name] = Field(default_factory=list, description="names that software reports")
    compute_capability: Name | None = Field(default=None, description="as torch reports it")


class DeviceEntry(Overriding):
    """One product."""

    id: Id = Field(description="the id of the product")
    family: Id = Field(description="the id of a family")
    name: Name = Field(description="the product's name")
    arch: Id = Field(description="the id of an architecture")
    identity: IdentityEntry = Field(description="how it says what it is")
    torch_devices_per_card: int = Field(default=1, ge=1, le=16, description="devices of a card")
    matrix_dtypes: DtypesEntry | None = Field(default=None, description="if not the architecture's")
    unverified_matrix_dtypes: DtypesEntry | None = Field(default=None, description="only claimed")
    peak: list[RatesEntry] = Field(default_factory=list, description="stated dense rates")
    measured: list[MeasuredEntry] = Field(default_factory=list, description="measured figures")
    memory: QuantityEntry | None = Field(default=None, description="memory as the maker counts it")
    usable_memory: QuantityEntry | None = Field(default=None, description="what software sees")
    memory_type: TextEntry | None = Field(default=None, description="HBM3, GDDR7, …")
    memory_bandwidth: QuantityEntry | None = Field(default=None, description="stated bandwidth")
    host_link: TextEntry | None = Field(default=None, description="PCIe 5.0 x16")
    host_link_bandwidth: QuantityEntry | None = Field(default=None, description="one direction")
    fabric: FabricEntry | None = Field(default=None, description="links between devices")
    fabric_bandwidth: QuantityEntry | None = Field(default=None, description="both directions")
    fabric_group: CountEntry | None = Field(
        default=None, description="how many devices the fabric links each to each"
    )
    p2p: PeerEntry | None = Field(default=None, description="peer access over PCIe")
    warp_size: CountEntry | None = Field(default=None, description="if not the architecture's")
    compute_units: CountEntry | None = Field(
        default=None, description="multiprocessors of a torch device (SM, CU)"
    )
    shared_memory_per_block: QuantityEntry | None = Field(
        default=None, description="if not the architecture's"
    )
    notes: Text = Field(default="", description="what the reader has to know")

    @model_validator(mode="after")
    def _judge(self) -> DeviceEntry:
        for key in ("memory", "usable_memory", "shared_memory_per_block"):
            require_unit(getattr(self, key), "B", key)
        for key in ("memory_bandwidth", "host_link_bandwidth", "fabric_bandwidth"):
            require_unit(getattr(self, key), "B/s", key)
        pci_ids = [(pci.id, pci.subsystem or "any subsystem") for pci in self.identity.pci_devices]
        require_distinct([f"{number} of {subsystem}" for number, subsystem in pci_ids])
        require_distinct([key for group in self.peak for key in group.values])
        require_distinct([key for group in self.measured for key in group.values])
        require_unverified(self.unverified_matrix_dtypes)
        return self


class ArchitectureEntry(Overriding):
    """One instruction set."""

    id: Id = Field(description="the id, as the vendor's compiler spells it")
    family: Id = Field(description="the id of a family")
    shared_with: list[Id] = Field(default_factory=list, description="families that have it too")
    name: Name = Field(description="its name")
    matrix_dtypes: DtypesEntry = Field(description="what the matrix units multiply natively")
    unverified_matrix_dtypes: DtypesEntry | None = Field(default=None, description="only claimed")
    absent_matrix_dtypes: DtypesEntry | None = Field(default=None, description="known not to be")
    warp_size: CountEntry | None = Field(default=None, description="lanes of a warp")
    shared_memory_per_block: QuantityEntry | None = Field(default=None, description="at most")
    flags: list[FlagsEntry] = Field(default_factory=list, description="yes-or-no features")
    triton_target: TritonTargetEntry | None = Field(default=None, description="backend:arch:warp")
    accumulation: list[TextEntry] = Field(default_factory=list, description="accumulate rates")
    notes: Text = Field(default="", description="what the reader has to know")

    @model_validator(mode="after")
    def _judge(self) -> ArchitectureEntry:
        require_unit(self.shared_memory_per_block, "B", "shared_memory_per_block")
        require_distinct([key for group in self.flags for key in group.values])
        require_unverified(self.unverified_matrix_dtypes)
        groups = (self.matrix_dtypes, self.unverified_matrix_dtypes, self.absent_matrix_dtypes)
        require_distinct([dtype for group in groups if group for dtype in group.value or []])
        return self


class TellEntry(Entry):
    """One sign of a family."""

    kind: Literal[
        "torch_attribute",
        "torch_version_attribute",
        "torch_version_tag",
        "module",
        "environment",
        "path",
        "library",
        "name",
        "arch",
    ] = Field(description="where to look")
    value: Pattern = Field(description="what to look for; a regular expression for kind name")
    note: Text = Field(default="", description="what the reader has to know")

    @model_validator(mode="after")
    def _judge(self) -> TellEntry:
        if self.kind == "name":
            try:
                re.compile(self.value)
            except (re.error, RecursionError, OverflowError) as error:
                raise fault(f"a regular expression ({error})", self.value, "value") from error
        return self


class DetectionEntry(Sourced):
    """How a family is found and told apart."""

    is_available: Text = Field(default="", description="what torch answers, as Python")
    tells: list[TellEntry] = Field(default_factory=list, description="signs of the family")
    excluded_by: list[TellEntry] = Field(default_factory=list, description="signs of another one")
    pci_classes: list[Annotated[str, StringConstraints(pattern=r"^0x[0-9a-f]{2,6}$")]] = Field(
        default_factory=lambda: ["0x03", "0x12", "0x0b40"], description="prefixes of PCI classes"
    )
    commands: list[Name] = Field(default_factory=list, description="command-line tools")
    libraries: list[Name] = Field(default_factory=list, description="management libraries")
    visible_devices_variables: list[Name] = Field(
        default_factory=list, description="variables that hide devices"
    )
    container_variables: list[Name] = Field(
        default_factory=list, description="variables of container runtimes"
    )
    device_nodes: list[Name] = Field(default_factory=list, description="globs of device nodes")
    dispatch_key: Name | None = Field(default=None, description="torch's dispatch key")
    masquerades_as: Literal["cuda", "hip"] | None = Field(
        default=None, description="whose software it looks like"
    )
    reported: dict[Name, Name] = Field(default_factory=dict, description="what it claims to be")
    model_numbers: dict[Name, Text] = Field(default_factory=dict, description="number: model")
    traps: list[Text] = Field(default_factory=list, description="what misleads")


class CollectivesEntry(Sourced):
    """The communication library."""

    library: Name = Field(description="its name")
    torch_backend: Name | None = Field(description="torch.distributed's name; null: not confirmed")
    variables: list[Name] = Field(default_factory=list, description="its variables")


class TritonEntry(Sourced):
    """Triton on the family."""

    works: bool | None = Field(description="whether a back end exists; null: not known")
    target: Name | None = Field(description="the back end's name")
    warp: Text = Field(default="", description="the warp size and its rule")
    packages: list[Name] = Field(default_factory=list, description="what to install")
    traps: list[Text] = Field(default_factory=list, description="what misleads")


class ServingEntry(Sourced):
    """Other serving stacks on the family."""

    stacks: dict[Name, Text] = Field(default_factory=dict, description="stack: where it is")
    forced: list[Text] = Field(default_factory=list, description="what they force on or off")


class FamilyEntry(Overriding):
    """One vendor's line of accelerators."""

    id: Id = Field(description="the id of the family")
    vendor: Name = Field(description="the company")
    name: Name = Field(description="the line's name")
    pci_vendor: PciId | None = Field(description="PCI vendor id; null: none listed")
    torch_device: Name = Field(description="torch's device type")
    torch_module: Name | None = Field(default=None, description="what to import before")
    detection: DetectionEntry = Field(description="how it is found and told apart")
    collectives: CollectivesEntry = Field(description="its communication library")
    triton: TritonEntry = Field(description="Triton on it")
    serving: ServingEntry = Field(description="other serving stacks on it")
    environment: dict[Name, Text] = Field(default_factory=dict, description="variable: meaning")


class LinkEntry(Sourced):
    """Measured points of the links between devices of one kind."""

    device: Id = Field(description="the id of a device")
    metric: Literal["all_reduce_busbw", "all_reduce_latency", "p2p_bandwidth", "p2p_latency"] = (
        Field(description="what was measured")
    )
    implementation: Name = Field(description="by which library")
    unit: Literal["GB/s", "us"] = Field(description="GB/s of bandwidths, us of latencies")
    points: dict[
        Annotated[str, StringConstraints(pattern=r"^(any|[1-9][0-9]{0,14})$")],
        dict[Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}$")], float],
    ] = Field(min_length=1, description="message bytes or `any`: world size: number")

    @model_validator(mode="after")
    def _judge(self) -> LinkEntry:
        wanted = "us" if self.metric.endswith("latency") else "GB/s"
        if self.unit != wanted:
            raise fault(f"{wanted} for {self.metric}", self.unit, "unit")
        for message, by_world in self.points.items():
            for world, value in by_world.items():
                check_quantity(value, self.unit, "points", message, world)
        return self


ENTRY_MODELS: dict[str, type[Entry]] = {
    "families": FamilyEntry,
    "architectures": ArchitectureEntry,
    "devices": DeviceEntry,
    "links": LinkEntry,
}
SECTIONS = ("schema", "complete", "sources", *ENTRY_MODELS)
