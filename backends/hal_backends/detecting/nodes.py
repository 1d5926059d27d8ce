"""Device nodes against PCI functions: a container sees every card of its host in sysfs, and has the
device nodes of those that it was given."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hal.errors import DetectionError
from hal.host import HostProbe
from hal_backends.detecting.pci import PciFunction
from hal_backends.detecting.rules import NodeRule


class Access(StrEnum):
    """Whether this process was given a card."""

    GIVEN = "given"
    NOT_GIVEN = "not given"
    NO_CONTROL = "no control node"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """What the nodes say of one card. nodes: those that were looked for and are there or not."""

    access: Access
    nodes: str


def node_findings(
    host: HostProbe,
    rule: NodeRule,
    functions: Sequence[PciFunction],
    listed: Collection[str],
    *,
    hardware: str,
) -> dict[str, NodeFinding]:
    """Address -> finding.

    listed: addresses that the vendor's tool lists here, which tells the cards that were given from
    the others where the nodes do not say which card is whose.

    Raises:
        DetectionError: there are nodes for some cards and nothing says for which.
    """
    if is_passed_through(host, rule):
        shown = rule.passed_through[1]
        return {f.address: NodeFinding(access=Access.GIVEN, nodes=shown) for f in functions}
    missing = [node for node in rule.control if not host.exists(node)]
    if missing:
        shown = f"{', '.join(missing)} missing"
        return {f.address: NodeFinding(access=Access.NO_CONTROL, nodes=shown) for f in functions}
    if not rule.pattern:
        shown = ", ".join(rule.control)
        return {f.address: NodeFinding(access=Access.GIVEN, nodes=shown) for f in functions}
    known = {f.address: rule.node_of(host, f) if rule.node_of else "" for f in functions}
    found = {}
    for address, node in known.items():
        if node:
            access = Access.GIVEN if host.exists(node) else Access.NOT_GIVEN
            shown = node if access is Access.GIVEN else f"{node} missing"
            found[address] = NodeFinding(access=access, nodes=shown)
    unknown = [function for function in functions if not known[function.address]]
    if unknown:
        nodes = [node for node in card_nodes(host, rule) if node not in known.values()]
        found |= _by_number(rule, unknown, nodes, listed, hardware)
    return found


def is_passed_through(host: HostProbe, rule: NodeRule) -> bool:
    """Whether the hardware is reached in the other way that the rule knows."""
    return all(path and host.exists(path) for path in rule.passed_through)


def card_nodes(host: HostProbe, rule: NodeRule) -> list[str]:
    """The nodes of single cards that are there, by number."""
    names = [n for n in host.list_dir(rule.folder) or () if re.fullmatch(rule.pattern, n)]
    return [f"{rule.folder}/{name}" for name in sorted(names, key=_by_digits)]


def _readable(pattern: str) -> str:
    """A pattern as people write it: "nvidia\\d+" as "nvidiaN"."""
    return pattern.replace(r"\d+", "N").replace(r"\.?", ".")


def _by_digits(name: str) -> tuple[int, str]:
    return int("0" + "".join(re.findall(r"\d+", name))[-9:]), name


def _by_number(
    rule: NodeRule,
    functions: Sequence[PciFunction],
    nodes: Sequence[str],
    listed: Collection[str],
    hardware: str,
) -> dict[str, NodeFinding]:
    """From the nodes that are no known card's: enough for all the others, none, or as listed."""
    if len(nodes) >= len(functions):
        shown = f"{nodes[0]} … {nodes[-1]}" if len(nodes) > 1 else "".join(nodes)
        return {f.address: NodeFinding(access=Access.GIVEN, nodes=shown) for f in functions}
    if not nodes:
        shown = f"no {rule.folder}/{_readable(rule.pattern)} for it"
        return {f.address: NodeFinding(access=Access.NOT_GIVEN, nodes=shown) for f in functions}
    here = {function.address for function in functions} & set(listed)
    shown = ", ".join(nodes)
    if len(here) < 1:
        raise DetectionError(
            f"{hardware} of this host",
            "a device node for each card, or a management tool that lists the cards given to us",
            f"{len(functions)} cards on PCI, nodes {shown} only, and nothing says whose they are",
            "give the container every card or the vendor's tool, or run outside of it",
        )
    return {
        function.address: NodeFinding(
            access=Access.GIVEN if function.address in here else Access.NOT_GIVEN, nodes=shown
        )
        for function in functions
    }


def drm_render_node(host: HostProbe, function: PciFunction) -> str:
    """The render node that the kernel made for a function: /dev/dri/renderD128; "" if none."""
    names = host.list_dir(f"/sys/bus/pci/devices/{function.address}/drm") or ()
    render = [name for name in names if re.fullmatch(r"renderD\d+", name)]
    return f"/dev/dri/{render[0]}" if render else ""
