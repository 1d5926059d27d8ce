"""How Biren's GPUs are found: by device nodes and brsmi, as pci.ids has no vendor id for them."""

from __future__ import annotations

from hal_backends.detecting.rules import FamilyRules, NodeRule, SoftwareRule, Tool, VisibleRule
from hal_backends.detecting.tools import csv_parser

_QUERY = "index,name,pci.bus_id,memory.total"

RULES = FamilyRules(
    backend="biren",
    family="biren",
    vendor="Biren",
    hardware="Biren GPU",
    pci_vendor="",
    torch_device="supa",
    name_pattern=r"^(Biren|BR|壁砺)",
    nodes=NodeRule(folder="/dev/biren", pattern=r"card_\d+", vendor_node="/dev/biren"),
    visible=VisibleRule(layers=(("SUPA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install torch of the version that torch_supa is made for",
        module="torch_supa",
        module_remedy="install BIRENSUPA and the torch_supa of this torch's version",
        driver_remedy="install Biren's driver; in a container pass /dev/biren",
    ),
    tools=(
        Tool(
            argv=("brsmi", "gpu", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"),
            parse=csv_parser("index", "name", "address", "memory"),
        ),
    ),
)
