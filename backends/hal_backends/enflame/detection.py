"""How Enflame's GCUs are found."""

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
    backend="enflame",
    family="enflame",
    vendor="Enflame",
    hardware="Enflame GCU",
    pci_vendor="0x1e36",
    torch_device="gcu",
    name_pattern=r"Enflame|^[LST]\d{2,3}",
    is_accelerator=is_card,
    nodes=NodeRule(control=("/dev/gcuctl",), pattern=r"gcu\d+", vendor_node="/dev/gcuctl"),
    visible=VisibleRule(layers=(("TOPS_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install torch of the version that torch_gcu is made for",
        module="torch_gcu",
        module_remedy="install TopsRider's torch_gcu of this torch's version",
        driver_remedy="install Enflame's driver (TopsRider); in a container pass /dev/gcuctl and "
        "/dev/gcu*",
        packages=("triton-gcu",),
    ),
    tools=(
        Tool(
            argv=("efsmi",),
            parse=table_parser(
                r"(?:Enflame )?\b[LST]\d{2,3}\w?\b",
                driver_pattern=r"Driver Ver:\s*(\S+)",
                index_pattern=r"\|\s*(\d+)\s",
            ),
        ),
    ),
)
