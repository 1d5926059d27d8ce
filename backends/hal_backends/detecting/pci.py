"""The PCI functions of one vendor, read from sysfs: no driver is touched. Evidence number one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from hal.errors import DetectionError
from hal.host import HostProbe
from hal.topology.pci_link import PciLink, generation_of, parse_speed, parse_width

PCI_FOLDER = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ADDRESS_IN_TEXT = re.compile(
    r"(?<![0-9A-Fa-f:.])(?:[0-9A-Fa-f]{2,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7](?![0-9A-Fa-f])"
)
_HEX = re.compile(r"0x([0-9a-f]{1,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    """One PCI function. Numbers as sysfs writes them: "0x10de"; address "0000:41:00.0".

    device: "" where only the vendor's tool knows of the device (sysfs hidden by a container).
    """

    address: str
    vendor: str
    device: str = ""
    subsystem: str = ""
    class_code: str = ""
    revision: str = ""
    driver: str = ""
    numa_node: int = -1
    link: PciLink | None = None
    is_virtual: bool = False

    @property
    def id(self) -> str:
        """As lspci writes it: "10de:2bb5"."""
        return f"{self.vendor.removeprefix('0x')}:{self.device.removeprefix('0x')}"


def scan_pci(
    host: HostProbe, vendor: str, *, has_internal_switch: bool = False
) -> list[PciFunction]:
    """Every function of `vendor` ("0x10de"), sorted by address; [] where sysfs is not there.

    has_internal_switch: cards of the family carry a switch of their own, so that the function's
    own link never leaves the card; the link that counts is the one of the card's upstream port.

    Raises:
        DetectionError: sysfs holds something that is no PCI identity.
        HostReadError: a file exists and cannot be read.
    """
    return [
        function_at(host, address, has_internal_switch=has_internal_switch)
        for address in host.list_dir(PCI_FOLDER) or ()
        if _ADDRESS.fullmatch(address) and _hex(host, f"{PCI_FOLDER}/{address}", "vendor") == vendor
    ]


def function_at(host: HostProbe, address: str, *, has_internal_switch: bool = False) -> PciFunction:
    """The function at an address; one without identity where sysfs does not have it.

    Raises as `scan_pci`.
    """
    folder = f"{PCI_FOLDER}/{address}"
    path = host.read_link(folder) or folder
    return PciFunction(
        address=address,
        vendor=_hex(host, folder, "vendor"),
        device=_hex(host, folder, "device"),
        subsystem=_subsystem(host, folder),
        class_code=_hex(host, folder, "class"),
        revision=_hex(host, folder, "revision"),
        driver=PurePosixPath(host.read_link(f"{folder}/driver") or "").name,
        numa_node=_number(host.read_text(f"{folder}/numa_node"), -1),
        link=_link(host, path, has_internal_switch),
        is_virtual=host.read_link(f"{folder}/physfn") is not None,
    )


def normalised_address(text: str) -> str:
    """ "00000000:41:00.0", "41:00.0" and "00:41:00.0" are all "0000:41:00.0"; "" for no address."""
    found = _ADDRESS_IN_TEXT.search(text)
    if found is None:
        return ""
    *domain, bus, slot = found.group().lower().split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{slot}"


def _hex(host: HostProbe, folder: str, name: str) -> str:
    """A number of sysfs in its own notation; "" if the kernel does not have the file."""
    path = f"{folder}/{name}"
    text = (host.read_text(path) or "").strip().lower()
    if text and not _HEX.fullmatch(text):
        raise DetectionError(
            path,
            "a hexadecimal number such as 0x10de",
            repr(text[:40]),
            "check that /sys is the kernel's own and not masked by a container",
        )
    return text


def _subsystem(host: HostProbe, folder: str) -> str:
    """ "0x10de:0x204b", the card's maker and model; "" if the kernel does not say."""
    parts = [_hex(host, folder, name) for name in ("subsystem_vendor", "subsystem_device")]
    return ":".join(parts) if all(parts) else ""


def _number(text: str | None, otherwise: int) -> int:
    try:
        return int((text or "").strip())
    except ValueError:
        return otherwise


def _link(host: HostProbe, path: str, has_internal_switch: bool) -> PciLink | None:
    """The link between the host and the card whose function is at `path` (below /sys/devices)."""
    parents = [part for part in PurePosixPath(path).parts if _ADDRESS.fullmatch(part)]
    if has_internal_switch and len(parents) >= 4:  # root port, upstream, downstream, function
        path = str(PurePosixPath(path).parents[1])
        parents = parents[:-2]
    port = str(PurePosixPath(path).parent) if len(parents) >= 2 else ""
    link = PciLink(
        speed=parse_speed(host.read_text(f"{path}/current_link_speed")),
        width=parse_width(host.read_text(f"{path}/current_link_width")),
        max_speed=parse_speed(host.read_text(f"{path}/max_link_speed")),
        max_width=parse_width(host.read_text(f"{path}/max_link_width")),
        port_max_speed=parse_speed(host.read_text(f"{port}/max_link_speed")) if port else 0.0,
        port_max_width=parse_width(host.read_text(f"{port}/max_link_width")) if port else 0,
    )
    return link if link.speed and link.width else None


def link_text(speed: float, width: int) -> str:
    """A link as people name it: "PCIe 5.0 x16"."""
    generation = generation_of(speed)
    return f"PCIe {generation}.0 x{width}" if generation else f"{speed:g} GT/s x{width}"
