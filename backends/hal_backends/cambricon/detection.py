"""How Cambricon's MLUs are found. An MLU370-X8 is two chips, each a PCI function of its own."""

from __future__ import annotations

from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    SoftwareRule,
    Tool,
    VisibleRule,
    is_card,
)
from hal_backends.detecting.tools import table_parser

RULES = FamilyRules(
    backend="cambricon",
    family="cambricon",
    vendor="Cambricon",
    hardware="Cambricon MLU",
    pci_vendor="0xcabc",
    torch_device="mlu",
    name_pattern=r"MLU",
    is_accelerator=is_card,
    nodes=NodeRule(
        control=("/dev/cambricon_ctl",),
        pattern=r"cambricon_dev\d+",
        vendor_node="/dev/cambricon_ctl",
    ),
    visible=VisibleRule(layers=(("MLU_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install torch of the version that torch_mlu is made for",
        module="torch_mlu",
        module_remedy="install Neuware and the torch_mlu of this torch's version",
        driver_remedy="install Cambricon's driver; in a container mount /dev/cambricon_* and cnmon",
        packages=("torch-mlu-ops",),
    ),
    tools=(
        Tool(
            argv=("cnmon",),
            parse=table_parser(
                r"MLU[\w-]+", driver_pattern=r"Driver v([\d.]+)", index_pattern=r"\|\s*(\d+)\s"
            ),
        ),
    ),
)
