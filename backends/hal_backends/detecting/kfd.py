"""What the kernel's compute driver (KFD) says of an AMD or Hygon card: architecture, units, links.

KFD packs an architecture as major * 10000 + minor * 100 + stepping, the last two in hexadecimal in
its name: 90402 is gfx942, 90010 is gfx90a (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c).
"""

from __future__ import annotations

import re

from hal.host import HostProbe
from hal_backends.detecting.pci import PCI_FOLDER, PciFunction

_NODES = "/sys/class/kfd/kfd/topology/nodes"


def kfd_details(host: HostProbe, function: PciFunction) -> dict[str, str]:
    """ "arch", "num_cores" (compute units), "xgmi_hive" and "memory_bytes", those that are told."""
    found: dict[str, str] = {}
    properties = _properties(host, function.address)
    version = properties.get("gfx_target_version", 0)
    if version:
        found["arch"] = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    simds, per_unit = properties.get("simd_count", 0), properties.get("simd_per_cu", 0)
    if simds and per_unit:
        found["num_cores"] = str(simds // per_unit)
    if properties.get("hive_id"):
        found["xgmi_hive"] = f"{properties['hive_id']:x}"
    memory = (host.read_text(f"{PCI_FOLDER}/{function.address}/mem_info_vram_total") or "").strip()
    if memory.isascii() and memory.isdigit() and int(memory) > 0:
        found["memory_bytes"] = memory
    return found


def _properties(host: HostProbe, address: str) -> dict[str, int]:
    """The properties of the KFD node of a PCI function; {} if there is none."""
    located = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", address)
    if located is None:
        return {}
    domain, bus, slot, number = (int(part, 16) for part in located.groups())
    place = {"domain": domain, "location_id": bus << 8 | slot << 3 | number}
    for node in host.list_dir(_NODES) or ():
        text = host.read_text(f"{_NODES}/{node}/properties") or ""
        values = {key: int(value) for key, value in re.findall(r"^(\w+) (\d{1,20})$", text, re.M)}
        if values.get("simd_count") and place.items() <= values.items():
            return values
    return {}
