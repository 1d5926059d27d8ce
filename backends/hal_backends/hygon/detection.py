"""How Hygon's DCUs are found. Their torch shows them as HIP devices, and Hygon's CPUs have many PCI
functions of the same vendor. gfx906 is a Z100 here and an MI50 at AMD: PCI decides."""

from __future__ import annotations

import json
from typing import Any

from hal.host import HostProbe
from hal_backends.detecting.kfd import kfd_details
from hal_backends.detecting.nodes import drm_render_node
from hal_backends.detecting.pci import normalised_address
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    Tool,
    ToolDevice,
    VisibleRule,
)

_ARGUMENTS = ("--showbus", "--showproductname", "--showmeminfo", "vram", "--json")


def parse_hy_smi(text: str) -> list[ToolDevice]:
    """The answer of `hy-smi --json`: {"card0": {"PCI Bus": …, "Card Series": …, …}, …}."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    devices = []
    for key, card in document.items() if isinstance(document, dict) else ():
        if not (isinstance(card, dict) and key.startswith("card") and key[4:].isdecimal()):
            continue
        values = {str(name).lower(): str(value).strip() for name, value in card.items()}
        memory = values.get("vram total memory (b)", "")
        mebibytes = values.get("vram total memory (mib)", "")
        devices.append(
            ToolDevice(
                index=int(key[4:]),
                name=values.get("card series", values.get("card model", "")),
                address=normalised_address(values.get("pci bus", "")),
                memory_bytes=int(memory)
                if memory.isdecimal()
                else (int(mebibytes) << 20 if mebibytes.isdecimal() else 0),
            )
        )
    return sorted(devices, key=lambda device: device.index)


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    found = kfd_details(host, sighting.function)
    for module in ("hycu", "hydcu"):
        version = (host.read_text(f"/sys/module/{module}/version") or "").strip()
        if version:
            found["driver"] = version
    if "arch" not in found and sighting.torch_capability.startswith("gfx"):
        found["arch"] = sighting.torch_capability
    return found


RULES = FamilyRules(
    backend="hygon",
    family="hygon",
    vendor="Hygon",
    hardware="Hygon DCU",
    pci_vendor="0x1d94",
    torch_device="cuda",
    name_pattern=r"DCU|HCU|Hygon|^(K100|Z100|BW\d|gfx)",
    nodes=NodeRule(
        control=("/dev/kfd",),
        folder="/dev/dri",
        pattern=r"renderD\d+",
        node_of=drm_render_node,
        vendor_node="/dev/mkfd",
    ),
    visible=VisibleRule(layers=(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),)),
    software=SoftwareRule(
        builds=frozenset({"hygon"}),
        torch_remedy="install the torch that comes with DTK, its version ends in +das…dtk…",
        driver_remedy="install Hygon's driver and DTK; in a container pass /dev/kfd, /dev/mkfd and "
        "/dev/dri and mount /opt/hyhal",
        packages=("flash-attn", "aiter", "lmslim"),
    ),
    tools=(
        Tool(argv=("hy-smi", *_ARGUMENTS), parse=parse_hy_smi),
        Tool(argv=("/opt/hyhal/bin/hy-smi", *_ARGUMENTS), parse=parse_hy_smi),
    ),
    refine=_refine,
)
