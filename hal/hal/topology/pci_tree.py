"""Reads the PCI tree above the accelerators of a host from sysfs; touches no driver."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from hal.errors import HostReadError
from hal.host_probe import HostProbe
from hal.topology.model import PciFunction, PciKind
from hal.topology.pci_link import PciLink, parse_speed, parse_width

PCI_DEVICES = "/sys/bus/pci/devices"
# Display controllers, processing accelerators, co-processors (PCI Code and ID Assignment).
ACCELERATOR_CLASSES = ("0x03", "0x12", "0x0b40")
_BRIDGE_CLASS = "0x0604"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def is_pci_address(text: str) -> bool:
    """Whether it has the form "0000:01:00.0"."""
    return _ADDRESS.fullmatch(text) is not None


def pci_addresses_in(text: str) -> set[str]:
    """Every PCI address that a text names."""
    return set(_ADDRESS.findall(text.lower()))


def is_accelerator_class(pci_class: str) -> bool:
    """Whether a class such as "0x030200" may be an accelerator's."""
    return pci_class.startswith(ACCELERATOR_CLASSES)


def read_pci_tree(host: HostProbe, claimed: Iterable[str] = ()) -> dict[str, PciFunction]:
    """Every accelerator-class function, every function in `claimed`, and the bridges above them.

    Raises:
        HostReadError: the list of PCI devices is there and cannot be read.
    """
    wanted = set(claimed)
    functions: dict[str, PciFunction] = {}
    for address in host.list_dir(PCI_DEVICES) or ():
        if not is_pci_address(address):
            continue
        pci_class = _Reader(host, f"{PCI_DEVICES}/{address}").word("class")
        if address in wanted or is_accelerator_class(pci_class):
            _add_with_bridges(host, address, functions)
    return {address: functions[address] for address in sorted(functions)}


def _add_with_bridges(host: HostProbe, address: str, functions: dict[str, PciFunction]) -> None:
    """Walk down the real folder of a function: /sys/devices/pci0000:00/0000:00:01.0/…/address."""
    real = host.read_link(f"{PCI_DEVICES}/{address}")
    folder, host_bridge = "", ""
    path: tuple[str, ...] = ()
    for part in (real or f"{PCI_DEVICES}/{address}").split("/")[1:]:
        folder = f"{folder}/{part}"
        if _HOST_BRIDGE.fullmatch(part):
            host_bridge = part
        elif is_pci_address(part):
            if part not in functions:
                functions[part] = _read_function(host, folder, part, path, host_bridge, functions)
            path = (*path, part)


def _read_function(
    host: HostProbe,
    folder: str,
    address: str,
    path: tuple[str, ...],
    host_bridge: str,
    above: Mapping[str, PciFunction],
) -> PciFunction:
    reader = _Reader(host, folder)
    subsystem = [reader.word(f"subsystem_{part}") for part in ("vendor", "device")]
    function = PciFunction(
        address=address,
        path=path,
        host_bridge=host_bridge,
        kind=PciKind.DEVICE,
        vendor_id=reader.word("vendor"),
        device_id=reader.word("device"),
        subsystem=":".join(subsystem) if all(subsystem) else "",
        pci_class=reader.word("class"),
        numa_node=_number(reader.word("numa_node")),
        driver=(host.read_link(f"{folder}/driver") or "").rsplit("/", 1)[-1],
        link=reader.link(),
        findings=tuple(reader.problems),
    )
    parent = above.get(path[-1]) if path else None
    kind = _kind(function, parent)
    return replace(function, kind=kind, link=_link_to_above(function.link, kind, parent))


def _kind(function: PciFunction, parent: PciFunction | None) -> PciKind:
    """By place: sysfs has the port type only in the configuration space, which needs root."""
    if not function.pci_class.startswith(_BRIDGE_CLASS):
        return PciKind.DEVICE
    if parent is None:
        return PciKind.ROOT_PORT
    if parent.kind is PciKind.SWITCH:
        return PciKind.SWITCH_PORT
    return PciKind.SWITCH


def _link_to_above(
    link: PciLink | None, kind: PciKind, parent: PciFunction | None
) -> PciLink | None:
    """The link with what the port above can do. For a port, sysfs shows the link below it."""
    is_port = kind in (PciKind.ROOT_PORT, PciKind.SWITCH_PORT)
    if link is None or is_port or parent is None or parent.link is None:
        return link
    port = parent.link
    return replace(link, port_max_speed=port.max_speed, port_max_width=port.max_width)


class _Reader:
    """Reads the small files of one function; one that cannot be read is noted, not fatal: a card
    that is half dead is what the topology is looked at for."""

    def __init__(self, host: HostProbe, folder: str) -> None:
        self._host = host
        self._folder = folder
        self.problems: list[str] = []

    def word(self, name: str) -> str:
        try:
            return (self._host.read_text(f"{self._folder}/{name}") or "").strip()
        except HostReadError as error:
            self.problems.append(f"{name} cannot be read: {error.found}")
            return ""

    def link(self) -> PciLink | None:
        link = PciLink(
            speed=parse_speed(self.word("current_link_speed")),
            width=parse_width(self.word("current_link_width")),
            max_speed=parse_speed(self.word("max_link_speed")),
            max_width=parse_width(self.word("max_link_width")),
        )
        return None if link == PciLink() else link


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,6}", text) else -1
