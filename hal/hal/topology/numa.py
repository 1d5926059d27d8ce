"""Reads the NUMA nodes of a host from sysfs."""

from __future__ import annotations

import re

from hal.host_probe import HostProbe
from hal.topology.model import NumaNode

NODE_FOLDER = "/sys/devices/system/node"
_MAX_CPUS = 1 << 16


def read_numa_nodes(host: HostProbe) -> tuple[NumaNode, ...]:
    """The NUMA nodes, sorted by number; none where the kernel shows none.

    Raises:
        HostReadError: a file that is there cannot be read.
    """
    names = [name for name in host.list_dir(NODE_FOLDER) or () if re.fullmatch(r"node\d+", name)]
    nodes = [_read_node(host, int(name.removeprefix("node"))) for name in names]
    return tuple(sorted(nodes, key=lambda node: node.number))


def _read_node(host: HostProbe, number: int) -> NumaNode:
    folder = f"{NODE_FOLDER}/node{number}"
    cpus = (host.read_text(f"{folder}/cpulist") or "").strip()
    memory = re.search(r"MemTotal:\s*(\d{1,15}) kB", host.read_text(f"{folder}/meminfo") or "")
    distances = (host.read_text(f"{folder}/distance") or "").split()
    return NumaNode(
        number=number,
        cpus=cpus,
        num_cpus=count_cpus(cpus),
        memory_bytes=int(memory.group(1)) << 10 if memory else 0,
        distances=tuple(int(word) for word in distances if re.fullmatch(r"\d{1,3}", word)),
    )


def count_cpus(cpulist: str) -> int:
    """ "0-15,32" -> 17; parts that are no range of CPUs count as none."""
    count = 0
    for part in cpulist.split(","):
        found = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if found:
            first, last = int(found.group(1)), int(found.group(2) or found.group(1))
            count += max(0, last - first + 1)
    return min(count, _MAX_CPUS)
