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
    missing = [node for node in rule.control if not host.exists(node)]
    if missing:
        shown = f"{', '.join(missing)} missing"
        return {f.address: NodeFinding(access=Access.NO_CONTROL, nodes=shown) for f in functions}
    if not rule.pattern:
        shown = ", ".join(rule.control)
        return {f.address: NodeFinding(access=Access.GIVEN, nodes=shown) for f in functions}
    found = {}
    unknown = []
    for function in functions:
        node = rule.node_of(host, function) if rule.node_of else ""
        if node:
            access = Access.GIVEN if host.exists(node) else Access.NOT_GIVEN
            shown = node if access is Access.GIVEN else f"{node} missing"
            found[function.address] = NodeFinding(access=access, nodes=shown)
        else:
            unknown.append(function)
    if unknown:
        found |= _by_number(host, rule, unknown, listed, hardware)
    return found


def card_nodes(host: HostProbe, rule: NodeRule) -> list[str]:
    """The nodes of single cards that are there, by number."""
    names = [n for n in host.list_dir(rule.folder) or () if re.fullmatch(rule.pattern, n)]
    return [f"{rule.folder}/{name}" for name in sorted(names, key=_by_digits)]


def _by_digits(name: str) -> tuple[int, str]:
    return int("0" + "".join(re.findall(r"\d+", name))[-9:]), name


def _by_number(
    host: HostProbe,
    rule: NodeRule,
    functions: Sequence[PciFunction],
    listed: Collection[str],
    hardware: str,
) -> dict[str, NodeFinding]:
    nodes = card_nodes(host, rule)
    looked_for = f"{rule.folder}/{rule.pattern}"
    if len(nodes) >= len(functions):
        shown = f"{nodes[0]} … {nodes[-1]}" if len(nodes) > 1 else "".join(nodes)
        return {f.address: NodeFinding(access=Access.GIVEN, nodes=shown) for f in functions}
    if not nodes:
        shown = f"no {looked_for}"
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
