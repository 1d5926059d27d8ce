"""The PCI functions of one vendor, read from sysfs: no driver is touched. Evidence number one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from hal.errors import DetectionError
from hal.host import HostProbe

PCI_FOLDER = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ADDRESS_IN_TEXT = re.compile(
    r"(?<![0-9A-Fa-f:.])(?:[0-9A-Fa-f]{2,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7](?![0-9A-Fa-f])"
)
_HEX = re.compile(r"0x([0-9a-f]{1,8})")
# GT/s of one lane -> generation, and usable bytes per second of one lane (PCIe base specification:
# 8b/10b coding up to 5 GT/s, 128b/130b from 8 GT/s on; flit mode at 64 GT/s counted the same way).
_GENERATIONS = {2.5: "1.0", 5.0: "2.0", 8.0: "3.0", 16.0: "4.0", 32.0: "5.0", 64.0: "6.0"}
_WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """One link as trained now, and what both of its ends are capable of. Speeds in GT/s a lane."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def best(self) -> str:
        """What it can carry as it is wired: "PCIe 5.0 x16"."""
        return f"PCIe {_GENERATIONS[self.max_speed]} x{self.max_width}"

    @property
    def trained(self) -> str:
        return f"PCIe {_GENERATIONS[self.speed]} x{self.width}"

    @property
    def bytes_per_s(self) -> float:
        """One direction, at the trained width and the highest common speed: an idle link lowers
        its speed and comes back under load, but lanes that were lost stay lost."""
        coding = 0.8 if self.max_speed < 8 else 128 / 130
        return self.max_speed * 1e9 / 8 * coding * self.width

    @property
    def is_narrow(self) -> bool:
        return self.width < self.max_width

    @property
    def is_slow(self) -> bool:
        return self.speed < self.max_speed


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
    speed, width, max_speed, max_width = (
        _lanes(host, path, name)
        for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    )
    if speed is None or width is None:
        return None
    if len(parents) >= 2:  # the port above may be capable of less than the card
        port = str(PurePosixPath(path).parent)
        max_speed = _least(max_speed, _lanes(host, port, "max_link_speed"))
        max_width = _least(max_width, _lanes(host, port, "max_link_width"))
    return PciLink(
        speed=speed,
        width=int(width),
        max_speed=max(max_speed or speed, speed),
        max_width=int(max(max_width or width, width)),
    )


def _lanes(host: HostProbe, path: str, name: str) -> float | None:
    """ "32.0 GT/s PCIe" -> 32.0, "16" -> 16.0; None for what is no link ("Unknown", 0, 255)."""
    found = re.match(r"\d+(?:\.\d+)?", (host.read_text(f"{path}/{name}") or "").strip())
    value = float(found.group()) if found else 0.0
    known = _GENERATIONS if name.endswith("speed") else _WIDTHS
    return value if value in known else None


def _least(first: float | None, second: float | None) -> float | None:
    values = [value for value in (first, second) if value is not None]
    return min(values) if values else None
