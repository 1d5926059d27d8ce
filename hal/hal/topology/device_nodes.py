"""Device nodes against PCI devices: a container shows in sysfs cards that it was not given.

A plug-in names the nodes that its card needs (attribute `device_nodes`). For all else the kernel
tells: a character device below the PCI device has a `uevent` with its name in /dev.
"""

from __future__ import annotations

import re

from hal.errors import HostReadError
from hal.host_probe import HostProbe
from hal.topology.pci_tree import PCI_DEVICES

# Folders of subsystems whose character devices are how programs reach a card.
_SUBSYSTEMS = ("drm", "accel", "habanalabs", "misc")
# A process that computes needs the render node; the card node is for displays.
_NOT_NEEDED = re.compile(r"dri/card\d+|dri/controlD\d+|accel/accel_controlD\d+")


def nodes_named_by_sysfs(host: HostProbe, address: str) -> tuple[str, ...]:
    """The nodes in /dev that the kernel made for a PCI device and that a program needs."""
    found = []
    for subsystem in _SUBSYSTEMS:
        folder = f"{PCI_DEVICES}/{address}/{subsystem}"
        for name in host.list_dir(folder) or ():
            node = _device_name(host, f"{folder}/{name}/uevent")
            if node and not _NOT_NEEDED.fullmatch(node):
                found.append(f"/dev/{node}")
    return tuple(sorted(found))


def _device_name(host: HostProbe, uevent: str) -> str:
    try:
        text = host.read_text(uevent) or ""
    except HostReadError:
        return ""  # the kernel's own file of a device that is just going away
    found = re.search(r"^DEVNAME=([\w/.:-]{1,80})$", text, re.MULTILINE)
    return found.group(1) if found else ""
