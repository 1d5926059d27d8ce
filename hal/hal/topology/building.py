"""Puts the topology together: what sysfs shows, and what plug-ins know of their devices.

Read from a `DeviceSpec`: `device_id`, or the attribute `pci_address` where the id is none, and of
the attributes `fabric` ("nvlink", …), `fabric_is_full_mesh`, `fabric_group`, `fabric_peers` (ids of
devices divided by spaces, `id*18` with 18 links), `p2p` (as of `PeerAccess`),
`p2p_verified_peers`, `p2p_refuted_peers` (device ids divided by spaces: what a check on this host
found, whatever is claimed) and `device_nodes` (paths divided by spaces).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import get_args

from hal.device import Confidence, DeviceSpec
from hal.device_group import is_mesh_known, links_each_to_each
from hal.host_probe import HostProbe
from hal.ops.collective import PeerAccess
from hal.topology.device_nodes import nodes_named_by_sysfs
from hal.topology.distance import bytes_per_s_between, distance_between
from hal.topology.model import (
    Accelerator,
    DevicePair,
    NumaNode,
    Obstacle,
    PciFunction,
    PciKind,
    Topology,
)
from hal.topology.numa import read_numa_nodes
from hal.topology.pci_link import PciLink
from hal.topology.pci_tree import is_accelerator_class, is_pci_address, read_pci_tree

_P2P_ORDER: tuple[PeerAccess, ...] = get_args(PeerAccess)
# Displays of management controllers that do have a PCIe link: ASPEED, Huawei's iBMC (pci.ids).
_BOARD_DISPLAYS = frozenset({("0x1a03", "0x2000"), ("0x19e5", "0x1711")})


def detect_topology(
    host: HostProbe,
    devices: Iterable[DeviceSpec] = (),
    obstacles: Mapping[str, Obstacle] = MappingProxyType({}),
) -> Topology:
    """The topology of a host.

    Args:
        host: where to look.
        devices: the devices that plug-ins describe on it. Those without a PCI address, such as a
            CPU, are the host itself and no accelerators of the topology.
        obstacles: PCI address -> what keeps a device that is not in `devices` from use.

    Raises:
        HostReadError: the folders of sysfs are there and cannot be read.
    """
    specs = {
        spec.device_id: spec for spec in devices if pci_address_of(spec) or _is_off_the_bus(spec)
    }
    nodes = read_numa_nodes(host)
    claimed = [pci_address_of(spec) for spec in specs.values()]
    functions = read_pci_tree(host, claimed)
    accelerators = _accelerators(host, specs, functions, obstacles)
    pairs = tuple(
        _pair(first, second, specs, functions, nodes)
        for first, second in combinations(accelerators, 2)
    )
    return Topology(
        numa_nodes=nodes,
        functions=_of_interest(functions, accelerators),
        accelerators=accelerators,
        pairs=pairs,
        findings=(
            *_host_findings(nodes, functions, accelerators),
            *_unknown_fabrics(specs.values()),
        ),
    )


def unclaimed_accelerators(host: HostProbe, claimed: Iterable[str]) -> tuple[PciFunction, ...]:
    """PCI devices that look like accelerators and whose addresses are not in `claimed`.

    Raises:
        HostReadError: the folders of sysfs are there and cannot be read.
    """
    taken = set(claimed)
    return tuple(
        function
        for address, function in read_pci_tree(host).items()
        if _may_be_accelerator(function) and address not in taken
    )


def pci_address_of(spec: DeviceSpec) -> str:
    """The PCI address of a device; "" if it is on no PCI bus."""
    address = str(spec.attributes.get("pci_address", spec.device_id)).lower()
    return address if is_pci_address(address) else ""


def _is_off_the_bus(spec: DeviceSpec) -> bool:
    return spec.torch_device != "cpu"


def _accelerators(
    host: HostProbe,
    specs: Mapping[str, DeviceSpec],
    functions: Mapping[str, PciFunction],
    obstacles: Mapping[str, Obstacle],
) -> tuple[Accelerator, ...]:
    """Claimed devices and unclaimed ones that may be accelerators, in the order of the tree."""
    claimed = {pci_address_of(spec) for spec in specs.values()}
    found: list[tuple[str, DeviceSpec | None]] = [
        (pci_address_of(spec), spec) for spec in specs.values()
    ]
    found += [
        (address, None)
        for address, function in functions.items()
        if address not in claimed and (address in obstacles or _may_be_accelerator(function))
    ]

    def place(item: tuple[str, DeviceSpec | None]) -> tuple[int, str, str]:
        function = functions.get(item[0])
        node = function.numa_node if function is not None else -1
        return (node if node >= 0 else 1 << 20, item[0], item[1].device_id if item[1] else "")

    found.sort(key=place)
    shared = _shared_bridges([address for address, _ in found if address in functions], functions)
    return tuple(
        _accelerator(host, number, address, spec, functions, shared, obstacles.get(address))
        for number, (address, spec) in enumerate(found)
    )


def _may_be_accelerator(function: PciFunction) -> bool:
    """Not the display of a board controller or of a virtual machine: most have no PCIe link."""
    return (
        is_accelerator_class(function.pci_class)
        and function.link is not None
        and (function.vendor_id, function.device_id) not in _BOARD_DISPLAYS
    )


def _shared_bridges(
    addresses: Sequence[str], functions: Mapping[str, PciFunction]
) -> frozenset[str]:
    """Bridges with more than one accelerator behind them."""
    counts: dict[str, int] = {}
    for address in addresses:
        for bridge in functions[address].path:
            counts[bridge] = counts.get(bridge, 0) + 1
    return frozenset(bridge for bridge, count in counts.items() if count > 1)


def _accelerator(
    host: HostProbe,
    number: int,
    address: str,
    spec: DeviceSpec | None,
    functions: Mapping[str, PciFunction],
    shared: frozenset[str],
    obstacle: Obstacle | None,
) -> Accelerator:
    function = functions.get(address)
    own = _own_path(function, functions, shared) if function is not None else []
    nodes = _nodes(host, address, spec)
    missing = tuple(node for node in nodes if not host.exists(node))
    return Accelerator(
        number=number,
        device_id=spec.device_id if spec is not None else address,
        name=spec.name if spec is not None else _unclaimed_name(function),
        backend=spec.backend if spec is not None else obstacle.backend if obstacle else "",
        is_usable=spec is not None,
        address=address,
        numa_node=function.numa_node if function is not None else -1,
        link=_weakest(own),
        shared=tuple(part for part in reversed(function.path) if part in shared)
        if function is not None
        else (),
        nodes=nodes,
        missing_nodes=missing,
        fabric=_attribute(spec, "fabric"),
        findings=_findings(spec, function, own, address, missing, obstacle),
    )


def _own_path(
    function: PciFunction, functions: Mapping[str, PciFunction], shared: frozenset[str]
) -> list[PciFunction]:
    """The function and the bridges above that it shares with no other accelerator: a card with a
    switch on it has its slot's link two bridges above the device."""
    own = [functions[part] for part in function.path if part not in shared]
    return [*own, function]


def _links_above(path: Iterable[PciFunction]) -> list[tuple[PciFunction, PciLink]]:
    """Links between a device and what it shares with others. Below a card's own switch some cards
    (Intel's) report 2.5 GT/s x1 for what never leaves the card: those say nothing."""
    ports = (PciKind.ROOT_PORT, PciKind.SWITCH_PORT)
    links = [
        (function, function.link)
        for function in path
        if function.link is not None and function.kind not in ports
    ]
    return [pair for pair in links if not _is_stub(pair[1])] or links


def _is_stub(link: PciLink) -> bool:
    return (link.best_speed, link.best_width) == (2.5, 1)


def _weakest(path: Iterable[PciFunction]) -> PciLink | None:
    links = [link for _, link in _links_above(path)]
    return min(links, key=lambda link: link.bytes_per_s, default=None)


def _nodes(host: HostProbe, address: str, spec: DeviceSpec | None) -> tuple[str, ...]:
    named = _attribute(spec, "device_nodes").split()
    if named:
        return tuple(named)
    return nodes_named_by_sysfs(host, address) if address else ()


def _unclaimed_name(function: PciFunction | None) -> str:
    if function is None:
        return "accelerator"
    return f"PCI {function.vendor_id.removeprefix('0x')}:{function.device_id.removeprefix('0x')}"


def _findings(
    spec: DeviceSpec | None,
    function: PciFunction | None,
    own: Sequence[PciFunction],
    address: str,
    missing: Sequence[str],
    obstacle: Obstacle | None,
) -> tuple[str, ...]:
    found = []
    if spec is None:
        found.append(obstacle.text if obstacle is not None else "no plug-in claims it")
    if function is None and address:
        found.append("sysfs does not show this PCI device")
    if function is not None and not function.driver:
        found.append("no kernel driver is bound to it")
    if missing:
        found.append(f"not given to this container or user: {', '.join(missing)} missing")
    for part, link in _links_above(own):
        where = "" if part is function else f"{part.address}: "
        found += [f"{where}{text}" for text in link.findings()]
    for part in own:
        found += [f"{part.address}: {text}" for text in part.findings]
    return tuple(found)


def _attribute(spec: DeviceSpec | None, name: str) -> str:
    return "" if spec is None else str(spec.attributes.get(name, ""))


def _pair(
    first: Accelerator,
    second: Accelerator,
    specs: Mapping[str, DeviceSpec],
    functions: Mapping[str, PciFunction],
    nodes: Sequence[NumaNode],
) -> DevicePair:
    one, other = functions.get(first.address), functions.get(second.address)
    distance, is_assumed, rate = None, False, None
    if one is not None and other is not None:
        distance, is_assumed = distance_between(one, other, len(nodes))
        rate = bytes_per_s_between(one, other, functions)
    ends = (specs.get(first.device_id), specs.get(second.device_id))
    fabric, links = _fabric_between(*ends, specs)
    return DevicePair(
        first=first.number,
        second=second.number,
        distance=distance,
        is_distance_assumed=is_assumed,
        fabric=fabric,
        fabric_links=links,
        is_fabric_probed=bool(fabric) and _is_probed(ends[0]),
        p2p=_p2p_between(*ends),
        bytes_per_s=rate,
    )


def _fabric_between(
    one: DeviceSpec | None, other: DeviceSpec | None, specs: Mapping[str, DeviceSpec]
) -> tuple[str, int]:
    fabric = _attribute(one, "fabric")
    if one is None or other is None or fabric in ("", "none"):
        return "", 0
    if fabric != _attribute(other, "fabric") or one.backend != other.backend:
        return "", 0
    peers = _peers(one, "fabric_peers")
    if peers:
        return (fabric, peers[other.device_id]) if other.device_id in peers else ("", 0)
    alike = [spec for spec in specs.values() if _attribute(spec, "fabric") == fabric]
    return (fabric, 0) if links_each_to_each(one.attributes, len(alike)) else ("", 0)


def _peers(spec: DeviceSpec, name: str) -> dict[str, int]:
    """Device id -> number of links (0 if not given) of an attribute `id*18 id`."""
    peers = {}
    for word in _attribute(spec, name).split():
        peer, _, count = word.partition("*")
        peers[peer] = int(count) if count.isdecimal() and len(count) < 4 else 0
    return peers


def _is_probed(spec: DeviceSpec | None) -> bool:
    seen = spec.evidence.get("attributes.fabric") if spec is not None else None
    return seen is not None and seen.confidence in (Confidence.PROBED, Confidence.MEASURED)


def _p2p_between(one: DeviceSpec | None, other: DeviceSpec | None) -> PeerAccess:
    if one is None or other is None or one.backend != other.backend:
        return "none"
    if other.device_id in _peers(one, "p2p_refuted_peers"):
        return "none"
    if other.device_id in _peers(one, "p2p_verified_peers"):
        return "verified"
    ranks = [
        _P2P_ORDER.index(value)
        for spec in (one, other)
        if (value := _attribute(spec, "p2p")) in _P2P_ORDER
    ]
    return _P2P_ORDER[min(ranks)] if len(ranks) == 2 else "none"


def _of_interest(
    functions: Mapping[str, PciFunction], accelerators: Iterable[Accelerator]
) -> dict[str, PciFunction]:
    wanted = set()
    for accelerator in accelerators:
        if accelerator.address in functions:
            wanted |= {accelerator.address, *functions[accelerator.address].path}
    return {address: item for address, item in functions.items() if address in wanted}


def _unknown_fabrics(specs: Iterable[DeviceSpec]) -> tuple[str, ...]:
    """Fabrics that several devices here may be linked by, as nobody says which of them are."""
    counts: dict[str, int] = {}
    for spec in specs:
        fabric = _attribute(spec, "fabric")
        is_probed = bool(_peers(spec, "fabric_peers"))
        if fabric not in ("", "none") and not is_probed and not is_mesh_known(spec.attributes):
            counts[fabric] = counts.get(fabric, 0) + 1
    return tuple(
        f"which of the {count} devices {fabric} links is not known: it cannot be probed without "
        "the vendor's tool, and no source says what the product has"
        for fabric, count in counts.items()
        if count > 1
    )


def _host_findings(
    nodes: Sequence[NumaNode],
    functions: Mapping[str, PciFunction],
    accelerators: Sequence[Accelerator],
) -> tuple[str, ...]:
    shared = sorted({address for item in accelerators for address in item.shared})
    found = [
        f"{function.address}, shared by several: {text}"
        for function, link in _links_above(functions[address] for address in shared)
        for text in link.findings()
    ]
    unplaced = [item for item in accelerators if item.address and item.numa_node < 0]
    if len(nodes) > 1 and unplaced:
        numbers = ", ".join(f"#{item.number}" for item in unplaced)
        found.append(f"the firmware gives no NUMA node for {numbers}: distances are assumed")
    return tuple(found)
