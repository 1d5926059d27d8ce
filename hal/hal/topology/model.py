"""The topology of a host as plain data: NUMA nodes, the PCIe tree, accelerators and their pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hal.ops.collective import PeerAccess
from hal.topology.pci_link import PciLink

TOPOLOGY_SCHEMA = "halstack.topology/1"


class Distance(StrEnum):
    """What lies between two devices, nearest first; the terms of `nvidia-smi topo -m`."""

    PIX = "PIX"
    """At most one PCIe switch."""
    PXB = "PXB"
    """Several PCIe switches, but no host bridge."""
    PHB = "PHB"
    """A host bridge of the CPU."""
    NODE = "NODE"
    """Several host bridges of one NUMA node."""
    SYS = "SYS"
    """The interconnect between NUMA nodes."""

    @property
    def rank(self) -> int:
        """0 for the nearest."""
        return list(Distance).index(self)


class PciKind(StrEnum):
    """What a PCI function is for in the tree."""

    ROOT_PORT = "root port"
    SWITCH = "switch"
    """The upstream port of a switch."""
    SWITCH_PORT = "switch port"
    """A downstream port of a switch."""
    DEVICE = "device"

    @property
    def is_bridge(self) -> bool:
        """Whether other functions may lie behind it."""
        return self is not PciKind.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node.

    Attributes:
        number: the kernel's number.
        cpus: its CPUs as the kernel lists them, "0-15,32-47".
        num_cpus: how many these are.
        memory_bytes: its memory, 0 if not known.
        distances: the relative cost of reaching each node, 10 for itself, in order of number.
    """

    number: int
    cpus: str = ""
    num_cpus: int = 0
    memory_bytes: int = 0
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One PCI function of the tree: a bridge with something behind it, or an accelerator.

    Attributes:
        address: "0000:01:00.0".
        path: addresses from the one at the root down to its parent; empty at the host bridge.
        host_bridge: "pci0000:00".
        kind: what it is for.
        vendor_id, device_id, subsystem: "0x10de", "0x2bb5", "0x10de:0x204e" ("" if not known).
        pci_class: six hexadecimal digits after 0x.
        numa_node: -1 if the firmware does not say.
        driver: the kernel driver bound to it, "" if none.
        link: the link to what is above it, for a port the link to what is below it; None if sysfs
            does not say.
        findings: what of it cannot be read, in words.
    """

    address: str
    path: tuple[str, ...]
    host_bridge: str
    kind: PciKind
    vendor_id: str
    device_id: str
    subsystem: str = ""
    pci_class: str = ""
    numa_node: int = -1
    driver: str = ""
    link: PciLink | None = None
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What keeps a device from use, in words, and the plug-in that says so."""

    backend: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """An accelerator of the host, claimed by a plug-in or not.

    Attributes:
        number: its place in every list and picture of this topology.
        device_id: the id that its plug-in gave it, or its PCI address.
        name: what people call it.
        backend: the plug-in that claims it or says why it cannot, "" if none does.
        is_usable: whether a plug-in describes it as a device.
        address: its PCI address, "" if it is on no PCI bus.
        numa_node: -1 if not known.
        link: the narrowest link between it and what it shares with other accelerators.
        shared: switches and ports above that it shares with other accelerators, nearest first.
        nodes: the device nodes it needs, as far as known.
        missing_nodes: those that are not there: this container was not given the device.
        fabric: "nvlink", "xgmi", …; "none" or "" without one.
        findings: what is wrong with it or its links, in words.
    """

    number: int
    device_id: str
    name: str
    backend: str = ""
    is_usable: bool = False
    address: str = ""
    numa_node: int = -1
    link: PciLink | None = None
    shared: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    missing_nodes: tuple[str, ...] = ()
    fabric: str = ""
    findings: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """False if device nodes that it needs are missing."""
        return not self.missing_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePair:
    """What connects two accelerators, by their numbers.

    Attributes:
        distance: over PCIe; None if one of them is on no PCI bus.
        is_distance_assumed: the firmware does not tell their NUMA nodes apart.
        fabric: the direct fabric between the two, "" if there is none.
        fabric_links: how many links of it, 0 if not known.
        is_fabric_probed: False if the fabric follows from what is known of this model only.
        p2p: "none", "claimed" (a driver or a database says so) or "verified" (by a bit-exact test).
        bytes_per_s: what the weakest PCIe link between the two carries in one direction, None if
            not known.
    """

    first: int
    second: int
    distance: Distance | None
    is_distance_assumed: bool = False
    fabric: str = ""
    fabric_links: int = 0
    is_fabric_probed: bool = False
    p2p: PeerAccess = "none"
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where everything is on one host.

    Attributes:
        numa_nodes: sorted by number.
        functions: address -> function: accelerators and all bridges above them.
        accelerators: by number.
        pairs: every pair of accelerators, first < second.
        findings: what is wrong with the host as a whole, in words.
    """

    numa_nodes: tuple[NumaNode, ...] = ()
    functions: Mapping[str, PciFunction] = field(default_factory=dict)
    accelerators: tuple[Accelerator, ...] = ()
    pairs: tuple[DevicePair, ...] = ()
    findings: tuple[str, ...] = ()

    def pair(self, first: int, second: int) -> DevicePair:
        """The pair of two different accelerators, in either order.

        Raises:
            KeyError: there is no such pair.
        """
        wanted = (min(first, second), max(first, second))
        for pair in self.pairs:
            if (pair.first, pair.second) == wanted:
                return pair
        raise KeyError(wanted)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        document = {"schema": TOPOLOGY_SCHEMA, **asdict(self)}
        result: dict[str, Any] = json.loads(json.dumps(document))
        return result
