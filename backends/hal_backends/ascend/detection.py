"""How Huawei's Ascend NPUs are found.

One PCI id is a whole generation; npu-smi tells the model. Of its names, "910B" alone is the *first*
910 (SoC 104, PCI d801), while the series that is sold as 910B calls itself 910B1 … 910B4-1 (SoC
220 to 225, d802); "Ascend910" on d803 is the 910C (SoC 250 to 255), two NPUs a package.
"""

from __future__ import annotations

import re

from hal.errors import DetectionError
from hal.host import HostProbe
from hal_backends.detecting.fabric import hccs
from hal_backends.detecting.pci import PciFunction, normalised_address
from hal_backends.detecting.rules import (
    FamilyRules,
    NodeRule,
    Sighting,
    SoftwareRule,
    Tool,
    ToolDevice,
    VisibleRule,
    has_class,
)

# SoC number -> model, as torch_npu and vllm-ascend count them.
_SOC_MODELS = {
    **dict.fromkeys(range(100, 105), "Ascend910"),
    **dict.fromkeys(range(200, 206), "Ascend310P3"),
    220: "Ascend910B1",
    221: "Ascend910B2",
    222: "Ascend910B2C",
    223: "Ascend910B3",
    224: "Ascend910B4",
    225: "Ascend910B4-1",
    250: "Ascend910_9391",
    251: "Ascend910_9392",
    252: "Ascend910_9381",
    253: "Ascend910_9382",
    254: "Ascend910_9372",
    255: "Ascend910_9362",
}
_GENERATIONS = {"0xd801": "910", "0xd802": "910B", "0xd803": "910C", "0xd500": "310P"}
_ARCHITECTURES = {
    "910": "ascend-910a",
    "910B": "ascend-910b",
    "910C": "ascend-910c",
    "310P": "ascend-310p",
}
_NAME_ROW = re.compile(r"^\|\s*(\d+)\s+((?:Ascend)?\d{3}[\w-]*|Ascend\w*)\s*\|\s*([^|]*)\|")
_CHIP_ROW = re.compile(r"^\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*([0-9A-Fa-f:.]+)\s*\|([^|]*)\|")
_MEMORY = re.compile(r"(\d+)\s*/\s*(\d+)")


def parse_npu_smi(text: str) -> list[ToolDevice]:
    """`npu-smi info`: a row with the NPU's name, and for each of its chips one with the bus id and
    the memory in MB, the HBM last. The logical index is "Phy-ID", or the order where there is none.
    """
    devices: list[ToolDevice] = []
    version = re.search(r"Version:\s*(\S+)", text)
    details = {"driver": version.group(1)} if version else {}
    name, health = "", ""
    for line in text.splitlines():
        chip = _CHIP_ROW.match(line)
        if chip is not None and name and normalised_address(chip.group(3)):
            memory = _MEMORY.findall(chip.group(4))
            devices.append(
                ToolDevice(
                    index=int(chip.group(2)) if chip.group(2) else len(devices),
                    name=name,
                    address=normalised_address(chip.group(3)),
                    memory_bytes=int(memory[-1][1]) << 20 if memory else 0,
                    details={**details, "health": health},
                )
            )
            name = ""
            continue
        row = _NAME_ROW.match(line)
        if row is not None:
            name, health = row.group(2), row.group(3).strip()
    return devices


def _is_accelerator(function: PciFunction) -> bool:
    """Kunpeng's ZIP and crypto engines are "processing accelerators" of Huawei as well: a25x."""
    return has_class(function, ("0x12",)) and function.device.startswith("0xd")


def _refine(host: HostProbe, sighting: Sighting) -> dict[str, str]:
    found = {}
    if sighting.torch_capability.isdigit():
        found["soc_version"] = sighting.torch_capability
    model = _SOC_MODELS.get(int(found.get("soc_version", 0)), "")
    reported = sighting.tool.name if sighting.tool is not None else ""
    generation = _GENERATIONS.get(sighting.function.device, "")
    model = model or _model(reported, generation)
    if model and generation and _generation(model) != generation:
        raise DetectionError(
            f"Ascend NPU {sighting.function.address}",
            "a PCI id and a model of one generation",
            f"PCI says the {generation} series ({sighting.function.id}), the driver says "
            f"{reported or model}",
            "update the driver and npu-smi; a card that is not what it says is to be reported",
        )
    if model:
        found["name"] = model
    series = generation or (_generation(model) if model else "")
    if series in _ARCHITECTURES:
        found["arch"] = _ARCHITECTURES[series]
    return found


def _model(reported: str, generation: str) -> str:
    """The chip's name in the vendor's libraries, from npu-smi's shorter one."""
    name = reported.removeprefix("Ascend")
    if name in ("910", "") and reported:
        return "Ascend910_9391" if generation == "910C" else "Ascend910"
    if name in ("910A", "910B", "910ProA", "910ProB", "910PremiumA"):
        return "Ascend910"
    return f"Ascend{name}" if name else ""


def _generation(model: str) -> str:
    if model.startswith("Ascend910_9"):
        return "910C"
    if re.match(r"Ascend910B\d", model):
        return "910B"
    return "310P" if model.startswith("Ascend310P") else model.removeprefix("Ascend")


RULES = FamilyRules(
    backend="ascend",
    family="ascend",
    vendor="Huawei",
    hardware="Ascend NPU",
    pci_vendor="0x19e5",
    torch_device="npu",
    name_pattern=r"^(Ascend|310|910|950)",
    is_accelerator=_is_accelerator,
    nodes=NodeRule(
        control=("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
        pattern=r"davinci\d+",
        vendor_node="/dev/davinci_manager",
    ),
    visible=VisibleRule(layers=(("ASCEND_RT_VISIBLE_DEVICES",),), is_pci_order=False),
    software=SoftwareRule(
        builds=frozenset({"cpu", "cuda"}),
        torch_remedy="install torch of the version that torch_npu is made for",
        module="torch_npu",
        module_remedy="install CANN and the torch_npu of this torch's version",
        tracks_torch=True,
        library="libascend_hal.so",
        libraries=(
            "/usr/local/Ascend/driver/lib64/driver/libascend_hal.so",
            "/usr/local/Ascend/driver/lib64/libascend_hal.so",
            "/usr/local/dcmi/libdcmi.so",
        ),
        driver_remedy="install the Ascend driver and firmware; in a container mount "
        "/usr/local/Ascend/driver or use the Ascend container runtime",
        packages=("triton-ascend",),
    ),
    tools=(Tool(argv=("npu-smi", "info"), parse=parse_npu_smi),),
    refine=_refine,
    fabric=hccs,
)
