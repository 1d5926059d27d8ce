"""How MetaX's GPUs are found. Their torch shows them as CUDA devices; PCI 9999 does not lie."""

from __future__ import annotations

from hal.host import HostProbe
from hal_backends.detecting.nodes import drm_render_node
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


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    """mx-smi says "MetaX C550" or, before 2.2, "MXC550"; torch always says "MXC550"."""
    name = sighting.tool.name if sighting.tool is not None else ""
    model = name.removeprefix("MetaX ")
    return {"name": model if model.startswith("MX") else f"MX{model}"} if name else {}


RULES = FamilyRules(
    backend="metax",
    family="metax",
    vendor="MetaX",
    hardware="MetaX GPU",
    pci_vendor="0x9999",
    torch_device="cuda",
    name_pattern=r"^(MX[CN]\d|MetaX)",
    is_accelerator=is_card,
    nodes=NodeRule(
        control=("/dev/mxcd",),
        folder="/dev/dri",
        pattern=r"renderD\d+",
        node_of=drm_render_node,
        vendor_node="/dev/mxcd",
    ),
    visible=VisibleRule(layers=(("CUDA_VISIBLE_DEVICES",),)),
    software=SoftwareRule(
        builds=frozenset({"metax"}),
        torch_remedy="install the torch that comes with MACA, its version ends in +metax…",
        library="libmxsml.so",
        libraries=tuple(
            f"{folder}/libmxsml.so"
            for folder in ("/opt/mxdriver/lib", "/opt/maca/lib", "/opt/mxn100/lib")
        ),
        driver_remedy="install MetaX's driver and the MACA SDK; in a container pass /dev/mxcd and "
        "/dev/dri and mount /opt/maca and /opt/mxdriver",
        packages=("flash-attn", "flashinfer-python"),
    ),
    tools=(
        Tool(
            argv=("mx-smi",),
            parse=table_parser(
                r"(?:MetaX )?(?:MX[CN]|C|N)\d{3}\w*",
                driver_pattern=r"Kernel Mode Driver Version:\s*(\S+)",
                index_pattern=r"\|\s*(\d+)\s",
            ),
        ),
    ),
    refine=_refine,
)
