"""How Moore Threads' GPUs are found."""

from __future__ import annotations

from hal_backends.detecting.rules import FamilyRules, NodeRule, SoftwareRule, Tool, VisibleRule
from hal_backends.detecting.tools import table_parser

RULES = FamilyRules(
    backend="moore_threads",
    family="mthreads",
    vendor="Moore Threads",
    hardware="Moore Threads GPU",
    pci_vendor="0x1ed5",
    torch_device="musa",
    name_pattern=r"^MTT\b",
    nodes=NodeRule(pattern=r"mtgpu\.?\d+", vendor_node="/dev/mtgpu.0"),
    visible=VisibleRule(layers=(("MUSA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"moore_threads", "cpu", "cuda"}),
        torch_remedy="install the torch that comes with the MUSA SDK",
        module="torch_musa",
        module_remedy="install the MUSA SDK and the torch_musa of this torch's version",
        tracks_torch=True,
        driver_remedy="install Moore Threads' driver and load its module mtgpu; in a container use "
        "the vendor's container toolkit",
        packages=("torchada",),
    ),
    tools=(
        Tool(
            argv=("mthreads-gmi",),
            parse=table_parser(
                r"MTT \w+", driver_pattern=r"Driver Version:\s*(\S+)", index_pattern=r"(\d+)\s"
            ),
        ),
    ),
)
