"""What the pictures of a topology show, and in which order: the tree without what says nothing.

A NUMA node holds its accelerators; a host bridge or a switch is a group of its own only where
several accelerators share it, as only then it makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hal.topology.model import Accelerator, DevicePair, NumaNode, PciFunction, PciKind, Topology


@dataclass(slots=True)
class BridgeGroup:
    """A switch or a host bridge with the accelerators behind it.

    Attributes:
        label: "switch 0000:41:00.0", "host bridge 0000:40".
        function: the switch's upstream port; None for a host bridge.
    """

    label: str
    function: PciFunction | None
    items: list[BridgeGroup | Accelerator] = field(default_factory=list)

    def accelerators(self) -> list[Accelerator]:
        """Every accelerator behind it, in order."""
        return flat(self.items)


@dataclass(slots=True)
class NodeGroup:
    """A NUMA node with what is attached to it. `node` is None for what has no known node."""

    label: str
    node: NumaNode | None
    items: list[BridgeGroup | Accelerator] = field(default_factory=list)


def flat(items: Sequence[BridgeGroup | Accelerator]) -> list[Accelerator]:
    """The accelerators of a list of groups and accelerators, in order."""
    found = []
    for item in items:
        found += [item] if isinstance(item, Accelerator) else item.accelerators()
    return found


def layout_of(topology: Topology) -> list[NodeGroup]:
    """The groups of the picture: every NUMA node, then what belongs to none."""
    groups = [NodeGroup(f"NUMA node {node.number}", node) for node in topology.numa_nodes]
    by_number = {group.node.number: group for group in groups if group.node is not None}
    elsewhere = NodeGroup("NUMA node not known", None)
    only = groups[0] if len(groups) == 1 else None
    for accelerator in topology.accelerators:
        group = by_number.get(accelerator.numa_node) or only or elsewhere
        group.items.append(accelerator)
    if elsewhere.items:
        groups.append(elsewhere)
    for group in groups:
        group.items = _grouped(flat(group.items), topology)
    return groups


def _grouped(
    accelerators: list[Accelerator], topology: Topology
) -> list[BridgeGroup | Accelerator]:
    chains = {item.number: _chain(item, topology) for item in accelerators}
    return _nested(accelerators, chains, 0, topology)


def _chain(accelerator: Accelerator, topology: Topology) -> list[str]:
    """The groups above an accelerator, outermost first: its host bridge and shared switches."""
    function = topology.functions.get(accelerator.address)
    if function is None:
        return []
    switches = [
        address
        for address in function.path
        if address in accelerator.shared and topology.functions[address].kind is PciKind.SWITCH
    ]
    return [function.host_bridge, *switches]


def _nested(
    accelerators: list[Accelerator],
    chains: dict[int, list[str]],
    depth: int,
    topology: Topology,
) -> list[BridgeGroup | Accelerator]:
    parts: dict[str, list[Accelerator]] = {}
    for item in accelerators:
        chain = chains[item.number]
        key = chain[depth] if depth < len(chain) else f"#{item.number}"
        parts.setdefault(key, []).append(item)
    found: list[BridgeGroup | Accelerator] = []
    for key, members in parts.items():
        if len(members) == 1:
            found.append(members[0])
            continue
        items = _nested(members, chains, depth + 1, topology)
        if depth == 0 and len(items) == 1:
            found += items  # one switch behind a host bridge: the bridge adds nothing
            continue
        function = topology.functions.get(key)
        name = f"switch {key}" if function is not None else f"host bridge {key.removeprefix('pci')}"
        found.append(BridgeGroup(name, function, items))
    return found


def pair_label(pair: DevicePair) -> str:
    """`NV18`, `XG`, `PIX`: a fabric by two letters and its links, else the distance."""
    if pair.fabric:
        return f"{pair.fabric[:2].upper()}{pair.fabric_links or ''}"
    return pair.distance.value if pair.distance is not None else "?"


def pair_mark(pair: DevicePair) -> str:
    """`*` where peer access was verified, `~` where it is only claimed."""
    return {"verified": "*", "claimed": "~"}.get(pair.p2p, "")


def printable(text: str) -> str:
    """The text with stand-ins for what would move a terminal's cursor or is not allowed in XML:
    names come from firmware and tools."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def short_address(address: str, topology: Topology) -> str:
    """Without the PCI domain where all are in domain 0000."""
    addresses = [item.address for item in topology.accelerators if item.address]
    if all(item.startswith("0000:") for item in addresses):
        return address.removeprefix("0000:")
    return address


def legend(topology: Topology) -> list[tuple[str, str]]:
    """(label, meaning) of every level and mark that the matrix has."""
    meanings = {
        "PIX": "at most one PCIe switch between",
        "PXB": "several PCIe switches",
        "PHB": "a host bridge of the CPU",
        "NODE": "host bridges of one NUMA node",
        "SYS": "the link between NUMA nodes",
    }
    shown = {pair.distance.value for pair in topology.pairs if pair.distance and not pair.fabric}
    found = [(name, text) for name, text in meanings.items() if name in shown]
    fabrics: dict[str, DevicePair] = {}
    for pair in topology.pairs:
        if pair.fabric:
            fabrics.setdefault(pair.fabric, pair)
    for fabric, pair in sorted(fabrics.items()):
        known = "" if pair.is_fabric_probed else " (as this model has it, not probed)"
        number = ", with the number of links" if pair.fabric_links else ""
        found.insert(0, (fabric[:2].upper(), f"{fabric}{number}{known}"))
    marks = {pair_mark(pair) for pair in topology.pairs}
    found += [("*", "peer access verified")] if "*" in marks else []
    found += [("~", "peer access claimed, not verified")] if "~" in marks else []
    return found


def all_findings(topology: Topology) -> list[tuple[str, str]]:
    """(what is wrong, the numbers of the accelerators that have it, or "host")."""
    owners: dict[str, list[str]] = {}
    for item in topology.accelerators:
        for text in item.findings:
            owners.setdefault(text, []).append(str(item.number))
    for text in topology.findings:
        owners.setdefault(text, []).append("host")
    return [(text, ", ".join(who)) for text, who in owners.items()]
