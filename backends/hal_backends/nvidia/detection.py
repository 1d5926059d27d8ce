"""How NVIDIA's GPUs are found. Names, minors and the driver's version are in /proc/driver/nvidia:
nothing but memory and modes needs nvidia-smi."""

from __future__ import annotations

import re

from hal.host import HostProbe
from hal_backends.detecting.fabric import nvlink
from hal_backends.detecting.pci import PciFunction
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    Tool,
    ToolDevice,
    VisibleRule,
)
from hal_backends.detecting.tools import csv_parser

_PROC = "/proc/driver/nvidia"
_QUERY = (
    "index,name,pci.bus_id,memory.total,uuid,driver_version,compute_cap,"
    "ecc.mode.current,mig.mode.current"
)
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
)


def _information(host: HostProbe, function: PciFunction) -> dict[str, str]:
    text = host.read_text(f"{_PROC}/gpus/{function.address}/information") or ""
    pairs = re.findall(r"^([^:\n]+):[ \t]*([^\n]*)$", text, re.MULTILINE)
    return {key.strip(): value.strip() for key, value in pairs}


def _node_of(host: HostProbe, function: PciFunction) -> str:
    minor = _information(host, function).get("Device Minor", "")
    return f"/dev/nvidia{minor}" if minor.isascii() and minor.isdigit() else ""


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    found = {}
    model = _information(host, sighting.function).get("Model", "")
    if model and model.lower() != "unknown":
        found["name"] = model
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)\s", host.read_text(f"{_PROC}/version") or "")
    if version:
        found["driver"] = version.group(1)
    tool = sighting.tool
    capability = (tool.details.get("compute_capability") if tool else "") or (
        sighting.torch_capability
    )
    if re.fullmatch(r"\d{1,2}\.\d", capability):
        found["arch"] = f"sm_{capability.replace('.', '')}"
    return found


def _partition_of(device: ToolDevice) -> str:
    return "MIG instances" if device.details.get("mig_mode") == "Enabled" else ""


RULES = FamilyRules(
    backend="nvidia",
    family="nvidia",
    vendor="NVIDIA",
    hardware="NVIDIA GPU",
    pci_vendor="0x10de",
    torch_device="cuda",
    name_pattern=r"^(NVIDIA|Tesla|GeForce|Quadro|TITAN|GRID|RTX|[ABHLT]\d{1,4}\b)",
    drivers=("nvidia",),
    nodes=NodeRule(
        control=("/dev/nvidiactl",),
        pattern=r"nvidia\d+",
        node_of=_node_of,
        vendor_node="/dev/nvidiactl",
        passed_through=("/usr/lib/wsl/lib/libcuda.so.1", "/dev/dxg"),  # Windows' driver, in WSL
    ),
    visible=VisibleRule(
        layers=(("CUDA_VISIBLE_DEVICES",),), order_variable=("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    ),
    software=SoftwareRule(
        builds=frozenset({"cuda"}),
        torch_remedy="install a CUDA build of torch (see pytorch.org, Get started)",
        library="libcuda.so.1",
        libraries=tuple(f"{folder}/libcuda.so.1" for folder in _LIBRARY_FOLDERS),
        driver_remedy="install NVIDIA's driver with its user libraries, one version of both, and "
        "reboot; in a container use the NVIDIA container runtime",
        packages=(
            "flash-attn",
            "flashinfer-python",
            "deep-gemm",
            "flash-mla",
            "sageattention",
            "nvidia-nccl-cu12",
            "nvidia-nccl-cu13",
        ),
    ),
    tools=(
        Tool(
            argv=("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"),
            parse=csv_parser(
                "index",
                "name",
                "address",
                "memory",
                "uuid",
                "driver",
                "compute_capability",
                "ecc_mode",
                "mig_mode",
            ),
        ),
    ),
    partition_of=_partition_of,
    refine=_refine,
    fabric=nvlink,
)
