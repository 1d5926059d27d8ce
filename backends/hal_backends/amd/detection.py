"""How AMD's GPUs are found. The kernel's compute driver tells architecture, units and memory; one
PCI id may be several products, which the PCI revision tells apart (libdrm, data/amdgpu.ids)."""

from __future__ import annotations

from hal.host import HostProbe
from hal_backends.detecting.fabric import xgmi
from hal_backends.detecting.kfd import kfd_details
from hal_backends.detecting.nodes import drm_render_node
from hal_backends.detecting.pci import PCI_FOLDER, PciFunction
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    VisibleRule,
    has_class,
)

_BY_REVISION = {
    ("0x744c", "0xc8"): "AMD Radeon RX 7900 XTX",
    ("0x744c", "0xcc"): "AMD Radeon RX 7900 XT",
    ("0x744c", "0xce"): "AMD Radeon RX 7900 GRE",
    ("0x744c", "0xcf"): "AMD Radeon RX 7900M",
    ("0x7550", "0xc0"): "AMD Radeon RX 9070 XT",
    ("0x7550", "0xc2"): "AMD Radeon RX 9070 GRE",
    ("0x7550", "0xc3"): "AMD Radeon RX 9070",
}
# Graphics inside of CPUs, by pci.ids: Picasso, Renoir, Cezanne, Rembrandt, Raphael, Mendocino,
# Phoenix, Hawk Point, Strix, Krackan, Granite Ridge. They share the host's memory.
_INTEGRATED = frozenset(
    {
        *("0x15d8", "0x1636", "0x1638", "0x164c", "0x1681", "0x164e", "0x1506"),
        *("0x15bf", "0x15c8", "0x1900", "0x1901", "0x150e", "0x1114", "0x13c0"),
    }
)


def _is_accelerator(function: PciFunction) -> bool:
    return has_class(function) and function.device not in _INTEGRATED


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    function = sighting.function
    found = kfd_details(host, function)
    product = (host.read_text(f"{PCI_FOLDER}/{function.address}/product_name") or "").strip()
    name = _BY_REVISION.get((function.device, function.revision), product)
    if name:
        found["name"] = name
    version = (host.read_text("/sys/module/amdgpu/version") or "").strip()
    if version:
        found["driver"] = version
    if "arch" not in found and sighting.torch_capability.startswith("gfx"):
        found["arch"] = sighting.torch_capability
    return found


RULES = FamilyRules(
    backend="amd",
    family="amd",
    vendor="AMD",
    hardware="AMD GPU",
    pci_vendor="0x1002",
    torch_device="cuda",
    name_pattern=r"AMD|Radeon|Instinct|FirePro|gfx\d",
    drivers=("amdgpu",),
    is_accelerator=_is_accelerator,
    nodes=NodeRule(
        control=("/dev/kfd",), folder="/dev/dri", pattern=r"renderD\d+", node_of=drm_render_node
    ),
    visible=VisibleRule(
        layers=(("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
    ),
    software=SoftwareRule(
        builds=frozenset({"hip"}),
        torch_remedy="install the ROCm build of torch (see pytorch.org, Get started)",
        driver_remedy="load the amdgpu kernel driver (ROCm's amdgpu-dkms where the kernel's own is "
        "too old for the card)",
        packages=("aiter", "amd-aiter", "flash-attn", "flashinfer-python"),
    ),
    refine=_refine,
    fabric=xgmi,
)
