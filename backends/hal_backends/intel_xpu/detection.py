"""How Intel's discrete GPUs are found. Each card carries a PCIe switch, so that the function itself
always reads 2.5 GT/s x1: the link that counts is the card's upstream port's. xpu-smi is also the
name of Kunlunxin's tool."""

from __future__ import annotations

import json
from typing import Any

from hal_backends.detecting.nodes import drm_render_node
from hal_backends.detecting.pci import PciFunction, normalised_address
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    SoftwareRule,
    Tool,
    ToolDevice,
    VisibleRule,
    has_class,
)


def parse_xpu_smi(text: str) -> list[ToolDevice]:
    """The answer of `xpu-smi discovery -j`."""
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    listed = document.get("device_list") if isinstance(document, dict) else None
    devices = []
    for device in listed if isinstance(listed, list) else ():
        if isinstance(device, dict) and isinstance(device.get("device_id"), int):
            devices.append(
                ToolDevice(
                    index=device["device_id"],
                    name=str(device.get("device_name", "")),
                    address=normalised_address(str(device.get("pci_bdf_address", ""))),
                )
            )
    return devices


def _is_accelerator(function: PciFunction) -> bool:
    """The graphics inside of a CPU is on bus 0."""
    return has_class(function, ("0x03",)) and function.address.split(":")[1] != "00"


RULES = FamilyRules(
    backend="intel_xpu",
    family="intel-xpu",
    vendor="Intel",
    hardware="Intel GPU",
    pci_vendor="0x8086",
    torch_device="xpu",
    name_pattern=r"Intel",
    drivers=("xe", "i915"),
    is_accelerator=_is_accelerator,
    has_internal_switch=True,
    nodes=NodeRule(folder="/dev/dri", pattern=r"renderD\d+", node_of=drm_render_node),
    visible=VisibleRule(layers=(("ZE_AFFINITY_MASK",),)),
    software=SoftwareRule(
        builds=frozenset({"xpu"}),
        torch_remedy="install the XPU build of torch (see pytorch.org, Get started)",
        library="libze_intel_gpu.so.1",
        libraries=tuple(
            f"{folder}/libze_intel_gpu.so.1"
            for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib")
        ),
        driver_remedy="install Intel's compute runtime (Level Zero); the kernel needs xe or i915",
        packages=("oneccl-bind-pt", "intel-extension-for-pytorch", "vllm-xpu-kernels"),
    ),
    tools=(Tool(argv=("xpu-smi", "discovery", "-j"), parse=parse_xpu_smi, is_proof=False),),
)
