"""How Kunlunxin's XPUs are found. Their environment has a stock CUDA build of torch: only PCI 1d22
and the module torch_xmlir tell; xpu-smi is also the name of Intel's tool. torch reports the
host's memory as the device's and is never asked for it."""

from __future__ import annotations

from hal.host import HostProbe
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    Tool,
    VisibleRule,
    is_card,
)
from hal_backends.detecting.tools import table_parser

_PARSE = table_parser(
    r"\b[KPR]\d{3}(?: \w+)?",
    driver_pattern=r"Driver Version:\s*(\S+)",
    index_pattern=r"\|\s*(\d+)\s",
)


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    name = sighting.tool.name if sighting.tool is not None else ""
    return {"name": "Kunlunxin P800"} if name.startswith("P800") else {}


RULES = FamilyRules(
    backend="kunlunxin",
    family="kunlunxin",
    vendor="Kunlunxin",
    hardware="Kunlunxin XPU",
    pci_vendor="0x1d22",
    torch_device="cuda",
    name_pattern=r"kunlun|^[KPR]\d{3}",
    is_accelerator=is_card,
    nodes=NodeRule(control=("/dev/xpuctrl",), pattern=r"xpu\d+", vendor_node="/dev/xpuctrl"),
    visible=VisibleRule(layers=(("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),)),
    software=SoftwareRule(
        builds=frozenset({"cuda"}),
        torch_remedy="install the torch that torch_xmlir is made for (a CUDA build)",
        module="torch_xmlir",
        module_remedy="install Kunlunxin's xpytorch, which brings torch_xmlir",
        driver_remedy="install Kunlunxin's driver and XRE; in a container pass /dev/xpuctrl and "
        "/dev/xpu*",
        packages=("xtorch-ops", "vllm-kunlun"),
    ),
    tools=(
        Tool(argv=("xpu-smi",), parse=_PARSE, is_proof=False),
        Tool(argv=("xpu_smi",), parse=_PARSE),
    ),
    refine=_refine,
)
