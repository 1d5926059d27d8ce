"""What the database answers with: devices, families, architectures and link measurements.

Plain frozen data, every quantity per torch device and in base units (FLOP/s, B, B/s, s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hal_capability_db.values import ConfidenceName, Fact, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Who vouches for a group of values that stand together."""

    source: tuple[str, ...]
    confidence: ConfidenceName
    note: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether the group may gate behaviour."""
        return self.confidence != "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """One sign of a family.

    kind: `torch_attribute` (of `torch`), `torch_version_attribute` (of `torch.version`),
    `torch_version_tag` (of the local version, without the plus sign), `module`, `environment`,
    `path`, `library`, `name` (a regular expression over device names) or `arch`.
    """

    kind: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionRules:
    """How a family is found and told from those that look like it.

    excluded_by: signs that the device is another family's. pci_classes: prefixes of the PCI class
    that its accelerators have. device_nodes: globs. reported: what its software claims to be.
    """

    group: Group
    is_available: str
    tells: tuple[Tell, ...] = ()
    excluded_by: tuple[Tell, ...] = ()
    pci_classes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    visible_devices_variables: tuple[str, ...] = ()
    container_variables: tuple[str, ...] = ()
    device_nodes: tuple[str, ...] = ()
    dispatch_key: str = ""
    masquerades_as: str = ""
    reported: Mapping[str, str] = field(default_factory=dict)
    model_numbers: Mapping[str, str] = field(default_factory=dict)
    traps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLibrary:
    """The family's communication library and the name torch.distributed knows it by."""

    group: Group
    name: str
    torch_backend: str | None
    variables: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonSupport:
    """Whether a Triton back end exists for the family, and what to install for it."""

    group: Group
    works: bool | None
    target: str
    packages: tuple[str, ...] = ()
    warp: str = ""
    traps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Other serving stacks that run on the family, and what they force on or off there."""

    group: Group
    stacks: Mapping[str, str] = field(default_factory=dict)
    forced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyProfile:
    """One vendor's line of accelerators. torch_module: what to import before torch knows it."""

    id: str
    vendor: str
    name: str
    pci_vendor: str | None
    torch_device: str
    torch_module: str | None
    detection: DetectionRules
    collectives: CollectiveLibrary
    triton: TritonSupport
    serving: Serving
    environment: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What every device of an instruction set can do.

    matrix_dtypes: what the matrix units multiply natively, vouched for; unverified_matrix_dtypes:
    what is only claimed; absent_matrix_dtypes: what they are known not to multiply. The value of
    triton_target is `backend:arch:warp`.
    """

    id: str
    family: str
    shared_with: tuple[str, ...]
    name: str
    matrix_dtypes: Fact[frozenset[str]]
    unverified_matrix_dtypes: Fact[frozenset[str]]
    absent_matrix_dtypes: Fact[frozenset[str]]
    warp_size: Fact[int]
    shared_memory_per_block_bytes: Fact[int]
    tma: Fact[bool]
    multicast: Fact[bool]
    wgmma: Fact[bool]
    tcgen05: Fact[bool]
    graph_capture: Fact[bool]
    triton_target: Fact[str]
    accumulation: tuple[Fact[str], ...] = ()
    notes: str = ""
    origin: str = ""

    @property
    def fp8_kind(self) -> Fact[Literal["fn", "fnuz"]]:
        """Which FP8 encoding the matrix units take. No value: none that somebody vouches for."""
        kinds: dict[str, Literal["fn", "fnuz"]] = {"fp8_e4m3fn": "fn", "fp8_e4m3fnuz": "fnuz"}
        for claim in (self.matrix_dtypes, self.unverified_matrix_dtypes):
            for dtype, kind in kinds.items():
                if dtype in (claim.value or ()):
                    return Fact(kind, "", claim.source, claim.confidence, claim.note)
        return unknown()

    @property
    def mx(self) -> Fact[frozenset[str]]:
        """The microscaling formats among the vouched-for matrix dtypes."""
        known = self.matrix_dtypes
        if known.value is None:
            return unknown()
        formats = frozenset(dtype for dtype in known.value if dtype.startswith("mxfp"))
        return Fact(formats, "", known.source, known.confidence, known.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device id of a product.

    subsystem: "0x10de:0x1234", where only that subsystem is the product. variant: the id is that of
    a variant, whose figures are the profile's only if `has_same_figures`. told_apart_by: how the
    products of one id are told apart, empty if the id has one product.
    """

    id: str
    subsystem: str | None = None
    variant: str = ""
    has_same_figures: bool = True
    told_apart_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One product. Quantities are per torch device, of which a card may show several.

    peak: dense rates by dtype, FLOP/s (OP/s for integers), as the maker or others state them;
    measured: rates and bandwidths somebody measured. memory_bytes: as stated, where a maker's GB of
    memory chips are GiB, as the chips are made; usable_memory_bytes: what software sees, where
    known. fabric: "nvlink", "xgmi", …, "none"; fabric_group: how many devices of a host it links
    each to each, 2 for a bridge. compute_units: multiprocessors (SM, CU). p2p: "enabled",
    "disabled" or "conditional" over PCIe; its note says on what.
    """

    id: str
    family: str
    name: str
    arch: str
    identity: Group
    pci_devices: tuple[PciDevice, ...]
    names: tuple[str, ...]
    compute_capability: str | None
    torch_devices_per_card: int
    matrix_dtypes: Fact[frozenset[str]]
    unverified_matrix_dtypes: Fact[frozenset[str]]
    peak: Mapping[str, Fact[float]]
    measured: Mapping[str, Fact[float]]
    memory_bytes: Fact[int]
    usable_memory_bytes: Fact[int]
    memory_type: Fact[str]
    memory_bandwidth: Fact[float]
    host_link: Fact[str]
    host_link_bytes_per_s: Fact[float]
    fabric: Fact[str]
    fabric_bytes_per_s: Fact[float]
    fabric_group: Fact[int]
    p2p: Fact[str]
    warp_size: Fact[int]
    compute_units: Fact[int]
    shared_memory_per_block_bytes: Fact[int]
    notes: str = ""
    origin: str = ""

    @property
    def pci_device_ids(self) -> tuple[str, ...]:
        """The PCI device ids, "0x2bb5"."""
        return tuple(device.id for device in self.pci_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """One measured point of the links between devices.

    metric: `all_reduce_busbw` (B/s), `all_reduce_latency` (s), `p2p_bandwidth` (B/s, one way) or
    `p2p_latency` (s). message_bytes: None where it does not apply or was not stated.
    """

    device: str
    metric: str
    implementation: str
    world_size: int
    message_bytes: int | None
    value: Fact[float]
    origin: str = ""
