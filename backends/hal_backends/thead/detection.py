"""How T-Head's PPUs are found. Their torch shows them as CUDA devices; Alibaba's network and
storage functions have the same PCI vendor."""

from __future__ import annotations

from hal_backends.detecting.rules import FamilyRules, NodeRule, SoftwareRule, Tool, VisibleRule
from hal_backends.detecting.tools import csv_parser

_QUERY = "index,name,pci.bus_id,memory.total,uuid,driver_version"

RULES = FamilyRules(
    backend="thead",
    family="thead-ppu",
    vendor="T-Head",
    hardware="T-Head PPU",
    pci_vendor="0x1ded",
    torch_device="cuda",
    name_pattern=r"PPU|ZW\d|T-Head",
    nodes=NodeRule(
        control=("/dev/alixpu", "/dev/alixpu_ctl"),
        pattern=r"alixpu_ppu\d+",
        vendor_node="/dev/alixpu_ctl",
    ),
    visible=VisibleRule(layers=(("CUDA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"thead", "cuda"}),
        torch_remedy="install the torch that comes with the PPU SDK",
        library="libhgml.so",
        libraries=(
            "/usr/local/PPU_SDK/lib/libhgml.so",
            "/usr/local/PPU_SDK/lib64/libhgml.so",
            "/usr/lib/x86_64-linux-gnu/libhgml.so",
        ),
        driver_remedy="install the PPU driver and SDK and set PPU_SDK; in a container pass "
        "/dev/alixpu*",
        packages=("flash-attn",),
    ),
    tools=(
        Tool(
            argv=("ppu-smi", f"--query-ppu={_QUERY}", "--format=csv,noheader,nounits"),
            parse=csv_parser("index", "name", "address", "memory", "uuid", "driver"),
        ),
    ),
)
