"""How Intel's Gaudi accelerators are found. Processes choose them by module id, not by order."""

from __future__ import annotations

import re

from hal.host import HostProbe
from hal_backends.detecting.pci import PCI_FOLDER, PciFunction
from hal_backends.detecting.rules import FamilyRules, NodeRule, SoftwareRule, Tool, VisibleRule
from hal_backends.detecting.tools import csv_parser

_QUERY = "index,module_id,name,bus_id,memory.total,driver_version"


def _node_of(host: HostProbe, function: PciFunction) -> str:
    names = host.list_dir(f"{PCI_FOLDER}/{function.address}/accel") or ()
    found = [name for name in names if re.fullmatch(r"accel\d+", name)]
    return f"/dev/accel/{found[0]}" if found else ""


RULES = FamilyRules(
    backend="gaudi",
    family="intel-hpu",
    vendor="Intel",
    hardware="Gaudi accelerator",
    pci_vendor="0x1da3",
    torch_device="hpu",
    name_pattern=r"^(HL-|GAUDI|Intel)",
    drivers=("habanalabs",),
    nodes=NodeRule(folder="/dev/accel", pattern=r"accel\d+", node_of=_node_of),
    visible=VisibleRule(
        layers=(("HABANA_VISIBLE_MODULES",),), selects_by="module_id", is_pci_order=False
    ),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install the torch of Intel's Gaudi software",
        module="habana_frameworks",
        module_remedy="install habana-torch-plugin of the Gaudi software's version",
        driver_remedy="install habanalabs-dkms and its firmware; in a container use the habana "
        "runtime",
        packages=("habana-torch-plugin", "vllm-gaudi"),
    ),
    tools=(
        Tool(
            argv=("hl-smi", "-Q", _QUERY, "-f", "csv,noheader,nounits"),
            parse=csv_parser("index", "module_id", "name", "address", "memory", "driver"),
        ),
    ),
)
