"""The link of a device group as a host's topology shows it, where a model's attributes only say
what cards of that model can have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import get_args

from hal.device import Confidence, Evidence
from hal.device_group import GroupLink
from hal.ops.collective import PeerAccess
from hal.topology.model import DevicePair, Topology

_P2P_ORDER: tuple[PeerAccess, ...] = get_args(PeerAccess)


def link_on_host(link: GroupLink, topology: Topology, device_ids: Collection[str]) -> GroupLink:
    """`link`, the one that the attributes of a device promise, as it is between these devices.

    The farthest pair counts for the distance, the weakest for peer access. A fabric that links no
    pair is none; one that links some is no full mesh. Over PCIe, no pair is faster than its weakest
    link, unless the bandwidth was measured; the same holds for a fabric whose islands only PCIe
    connects. Unchanged if a device is not in the topology.
    """
    numbers = {item.number for item in topology.accelerators if item.device_id in set(device_ids)}
    if len(numbers) < max(2, len(set(device_ids))):
        return link
    pairs = [pair for pair in topology.pairs if pair.first in numbers and pair.second in numbers]
    has_fabric = any(pair.fabric for pair in pairs)
    kind = link.kind
    if not has_fabric and link.kind != "host":
        kind = "pcie"
    changed = replace(
        link,
        kind=kind,
        p2p=_P2P_ORDER[min(_P2P_ORDER.index(pair.p2p) for pair in pairs)],
        is_full_mesh=(has_fabric and all(pair.fabric for pair in pairs)) or len(numbers) == 2,
        is_mesh_known=link.is_mesh_known or kind == "pcie" or len(numbers) == 2,
        distance=_farthest(pairs),
    )
    return changed if _is_connected(numbers, pairs) else _bounded(changed, pairs)


def _is_connected(numbers: Collection[int], pairs: Iterable[DevicePair]) -> bool:
    """Whether the fabric alone reaches every device from every other one."""
    neighbours: dict[int, set[int]] = {number: set() for number in numbers}
    for pair in pairs:
        if pair.fabric:
            neighbours[pair.first].add(pair.second)
            neighbours[pair.second].add(pair.first)
    reached: set[int] = set()
    ahead = list(neighbours)[:1]
    while ahead:
        number = ahead.pop()
        ahead += neighbours[number] - reached
        reached.add(number)
    return reached == set(neighbours)


def _farthest(pairs: Iterable[DevicePair]) -> str:
    levels = [pair.distance for pair in pairs if pair.distance is not None]
    return max(levels, key=lambda level: level.rank).value if levels else ""


def _bounded(link: GroupLink, pairs: Iterable[DevicePair]) -> GroupLink:
    rates = [pair.bytes_per_s for pair in pairs if pair.bytes_per_s is not None]
    if not rates or link.evidence.confidence is Confidence.MEASURED:
        return link
    weakest = min(rates)
    if link.bandwidth_bytes_per_s is not None and link.bandwidth_bytes_per_s <= weakest:
        return link
    seen = Evidence(source="/sys/bus/pci/devices", found=f"weakest PCIe link {weakest:.3g} B/s")
    return replace(link, bandwidth_bytes_per_s=weakest, evidence=seen)
