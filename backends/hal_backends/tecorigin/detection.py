"""How Tecorigin's accelerators are found: by their device nodes and teco-smi, as pci.ids has no
vendor id for them. The arrays of one card are devices of their own at one bus id."""

from __future__ import annotations

from hal.host import HostProbe
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    Tool,
    VisibleRule,
)
from hal_backends.detecting.tools import table_parser

_T1_MEMORY_BYTES = 16 << 30  # of each of its four arrays; later cards share the name, not the size


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    is_t1 = sighting.tool is not None and 0 < sighting.tool.memory_bytes <= _T1_MEMORY_BYTES
    return {"name": "Tecorigin T1"} if is_t1 else {}


RULES = FamilyRules(
    backend="tecorigin",
    family="tecorigin",
    vendor="Tecorigin",
    hardware="Tecorigin accelerator",
    pci_vendor="",
    torch_device="sdaa",
    name_pattern=r"TECO|^T1\b",
    nodes=NodeRule(pattern=r"tcaicard\d+", vendor_node="/dev/tcaicard0"),
    visible=VisibleRule(layers=(("SDAA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install torch of the version that torch_sdaa is made for",
        module="torch_sdaa",
        module_remedy="install the Tecorigin toolkit and the torch_sdaa of this torch's version",
        driver_remedy="install Tecorigin's driver; in a container pass /dev/tcaicard*",
    ),
    tools=(
        Tool(
            argv=("teco-smi",),
            parse=table_parser(
                r"TECO_\w+",
                driver_pattern=r"SDAADriver:\s*(\S+)",
                index_pattern=r"\|\s*(\d+)\s",
            ),
        ),
    ),
    refine=_refine,
)
