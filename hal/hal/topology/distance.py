"""How far two PCI functions are from each other: what lies on the way, and what it carries.

The levels are those of `nvidia-smi topo -m`, and they are found as NCCL does it: from the place
where the paths of the two through sysfs part.
"""

from __future__ import annotations

from collections.abc import Mapping

from hal.topology.model import Distance, PciFunction, PciKind


def distance_between(
    first: PciFunction, second: PciFunction, num_numa_nodes: int
) -> tuple[Distance, bool]:
    """The distance, and whether it is assumed because the firmware tells no NUMA node.

    What is not known counts as far: on a host with several NUMA nodes, two devices behind different
    host bridges without a node are at SYS.
    """
    shared = shared_path(first, second)
    if shared:
        # A card behind a port of the switch itself has one bridge more on its path than the switch.
        is_direct = max(len(first.path), len(second.path)) - len(shared) <= 1
        return (Distance.PIX if is_direct else Distance.PXB), False
    if first.host_bridge and first.host_bridge == second.host_bridge:
        return Distance.PHB, False
    if num_numa_nodes <= 1:
        return Distance.NODE, False
    if first.numa_node < 0 or second.numa_node < 0:
        return Distance.SYS, True
    return (Distance.NODE if first.numa_node == second.numa_node else Distance.SYS), False


def shared_path(first: PciFunction, second: PciFunction) -> tuple[str, ...]:
    """The bridges that both lie behind, from the root down."""
    if first.host_bridge != second.host_bridge:
        return ()
    shared = []
    for one, other in zip(first.path, second.path, strict=False):
        if one != other:
            break
        shared.append(one)
    return tuple(shared)


def bytes_per_s_between(
    first: PciFunction, second: PciFunction, functions: Mapping[str, PciFunction]
) -> float | None:
    """What the weakest PCIe link between the two carries in one direction; None if none of them is
    known. The links between host bridges and sockets are not counted: sysfs does not show them."""
    depth = len(shared_path(first, second))
    rates = [
        rate
        for function in (first, second)
        for address in (*function.path[depth:], function.address)
        if (rate := _bytes_per_s_above(functions.get(address))) > 0
    ]
    return min(rates, default=None)


def _bytes_per_s_above(function: PciFunction | None) -> float:
    """Of the link above a function; 0 for a port, whose link is below it."""
    if function is None or function.link is None:
        return 0.0
    is_port = function.kind in (PciKind.ROOT_PORT, PciKind.SWITCH_PORT)
    return 0.0 if is_port else function.link.bytes_per_s
