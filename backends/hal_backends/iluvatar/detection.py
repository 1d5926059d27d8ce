"""How Iluvatar CoreX's GPUs are found. Their torch shows them as CUDA devices of an old NVIDIA card
(CUDA 10.2, capability 7.1). A BI-V150 is two devices of 32 GiB, each a PCI function of its own."""

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
    backend="iluvatar",
    family="iluvatar",
    vendor="Iluvatar CoreX",
    hardware="Iluvatar GPU",
    pci_vendor="0x1e3e",
    torch_device="cuda",
    name_pattern=r"Iluvatar|^(BI-V|MR-V|TG-V)",
    is_accelerator=is_card,
    nodes=NodeRule(pattern=r"iluvatar\d+", vendor_node="/dev/iluvatar0"),
    visible=VisibleRule(layers=(("CUDA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"iluvatar"}),
        torch_remedy="install the torch that comes with CoreX, its version ends in +corex…",
        library="libixml.so",
        libraries=tuple(
            f"{folder}/libixml.so"
            for folder in (
                "/usr/local/corex/lib64",
                "/usr/local/corex/lib",
                "/usr/local/iluvatar/lib64",
            )
        ),
        driver_remedy="install Iluvatar's driver and the CoreX SDK; in a container mount "
        "/usr/local/corex",
        packages=("flash-attn", "ixformer"),
    ),
    tools=(
        Tool(
            argv=("ixsmi",),
            parse=table_parser(
                r"Iluvatar [A-Z]{2}-V\d+\w*(?: DUO)?|(?:BI|MR)-V\d+\w*",
                driver_pattern=r"Driver Version:\s*(\S+)",
                index_pattern=r"\|\s*(\d+)\s",
            ),
        ),
    ),
)
