"""Links between devices apart from PCIe, as this host has them: a product that could be linked may
stand without its bridge, and a plan that counts on it would be wrong by an order of magnitude."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.host import HostProbe
from hal_backends.detecting.rules import Sighting
from hal_backends.detecting.tools import TOOL_DEADLINE_S

NVLINK_COMMAND = ("nvidia-smi", "topo", "-m")
HCCS_COMMAND = ("npu-smi", "info", "-t", "topo")
_HCCS_LINK = re.compile(r"HCCS(_SW)?|SIO")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A device that may be linked to others. details: see `FamilyRules.refine`."""

    device_id: str
    sighting: Sighting
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """name: "nvlink", "xgmi", …. peers: device id -> the devices it is linked to, with the number
    of links, 0 where that is not told. source: what said so."""

    name: str
    peers: Mapping[str, Mapping[str, int]]
    source: str


def nvlink(host: HostProbe, members: Sequence[Member]) -> Fabric | None:
    """From the matrix of `nvidia-smi topo -m`, where "NV18" stands for 18 links; None where the
    tool does not tell.

    Raises:
        HostReadError: the tool did not come to an end.
    """
    by_index = {m.sighting.tool.index: m.device_id for m in members if m.sighting.tool is not None}
    output = host.run_command(NVLINK_COMMAND, TOOL_DEADLINE_S) if by_index else None
    if output is None or output.exit_code != 0:
        return None
    rows = {}
    for line in _STYLE.sub("", output.stdout).splitlines():
        label, *cells = (cell.strip() for cell in line.split("\t"))
        index = re.fullmatch(r"GPU(\d{1,4})", label)
        if index and "X" in cells:  # the row of a GPU, not the header
            rows[int(index.group(1))] = cells
    if not rows.keys() >= by_index.keys():
        return None
    peers: dict[str, dict[str, int]] = {device: {} for device in by_index.values()}
    for number, device in by_index.items():
        for other, cell in enumerate(rows[number]):
            links = re.fullmatch(r"NV(\d{1,3})", cell)
            if links and other in by_index:
                peers[device][by_index[other]] = int(links.group(1))
    return Fabric(name="nvlink", peers=peers, source=f"command {' '.join(NVLINK_COMMAND)}")


def hccs(host: HostProbe, members: Sequence[Member]) -> Fabric | None:
    """From the matrix of `npu-smi info -t topo`: "HCCS", "HCCS_SW" (through a switch) and "SIO"
    (the other die of a package) are links, without their number; None where the tool does not tell.

    Raises:
        HostReadError: the tool did not come to an end.
    """
    by_index = {m.sighting.tool.index: m.device_id for m in members if m.sighting.tool is not None}
    output = host.run_command(HCCS_COMMAND, TOOL_DEADLINE_S) if by_index else None
    if output is None or output.exit_code != 0:
        return None
    rows = {}
    for line in output.stdout.splitlines():
        label, *cells = line.split() or [""]
        index = re.fullmatch(r"NPU(\d{1,4})", label)
        if index and "X" in cells:  # the row of an NPU, not the header
            rows[int(index.group(1))] = cells
    if not rows.keys() >= by_index.keys():
        return None
    columns = sorted(rows)
    peers = {
        device: {
            by_index[other]: 0
            for other, cell in zip(columns, rows[number], strict=False)
            if other in by_index and _HCCS_LINK.fullmatch(cell)
        }
        for number, device in by_index.items()
    }
    return Fabric(name="hccs", peers=peers, source=f"command {' '.join(HCCS_COMMAND)}")


def xgmi(host: HostProbe, members: Sequence[Member]) -> Fabric | None:
    """From the hive that the compute driver puts linked cards into; none of them is no link."""
    hives = {member.device_id: member.details.get("xgmi_hive", "") for member in members}
    if not any("arch" in member.details for member in members):
        return None  # the driver did not speak
    peers = {
        device: {other: 0 for other in hives if other != device and hives[other] == hive}
        for device, hive in hives.items()
        if hive
    }
    return Fabric(
        name="xgmi",
        peers={device: peers.get(device, {}) for device in hives},
        source="/sys/class/kfd/kfd/topology/nodes",
    )
