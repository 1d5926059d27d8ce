"""One family on one host: which cards are there, which of them can be used, what is missing.

The evidence is taken in an order that touches as little as possible: PCI in sysfs, files of
packages, modules, the vendor's tool, and torch in a child process only if the rest leaves a device
without a name. A host without the vendor's hardware costs one listing of sysfs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hal.device import Evidence, MissingDependency
from hal.errors import DetectionError, HalError, UserError
from hal.host import HostProbe
from hal_backends.detecting.dependencies import missing_software, unusable_cards
from hal_backends.detecting.nodes import (
    Access,
    NodeFinding,
    card_nodes,
    is_passed_through,
    node_findings,
)
from hal_backends.detecting.pci import PciFunction, function_at, scan_pci
from hal_backends.detecting.rules import FamilyRules, Sighting
from hal_backends.detecting.software import Claim, TorchBuild, masquerade_claims, torch_build
from hal_backends.detecting.tools import ToolReport, run_tools
from hal_backends.detecting.torch_probe import TorchReport, ask_torch
from hal_backends.detecting.verdict import (
    refuse_foreign_addresses,
    refuse_foreign_claims,
    refuse_foreign_names,
)
from hal_backends.detecting.visible import Selectable, Visibility, visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One device that this process can use. A PCI function of two chips is two of them."""

    device_id: str
    sighting: Sighting
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySurvey:
    """What a family's detection found. error: why it refuses; then there are no cards."""

    rules: FamilyRules
    cards: tuple[Card, ...] = ()
    missing: tuple[MissingDependency, ...] = ()
    build: TorchBuild | None = None
    visibility: Visibility = field(default_factory=lambda: Visibility(ordinals={}))
    report: ToolReport = field(default_factory=ToolReport)
    torch: TorchReport = field(default_factory=TorchReport)
    error: UserError | None = None


@dataclass(slots=True)
class _Gathered:
    """The evidence about the whole family, as it is gathered."""

    functions: list[PciFunction]
    is_sysfs_hidden: bool = False
    build: TorchBuild | None = None
    foreign: list[Claim] = field(default_factory=list)
    report: ToolReport = field(default_factory=ToolReport)
    torch: TorchReport = field(default_factory=TorchReport)
    findings: Mapping[str, NodeFinding] = field(default_factory=dict)


def survey_family(host: HostProbe, rules: FamilyRules) -> FamilySurvey:
    """Look at a host. What detection refuses is in the answer's `error`, with what is missing."""
    gathered = _Gathered([])
    try:
        gathered.functions = accelerators(host, rules)
        gathered.is_sysfs_hidden = not gathered.functions and _has_vendor_node(host, rules)
        if not gathered.functions and not gathered.is_sysfs_hidden:
            return FamilySurvey(rules=rules)
        _gather(host, rules, gathered)
        return _conclude(host, rules, gathered)
    except HalError as error:
        return FamilySurvey(rules=rules, build=gathered.build, error=error)


def accelerators(host: HostProbe, rules: FamilyRules) -> list[PciFunction]:
    """The family's accelerators on PCI. Virtual functions of a card that is here itself are for
    virtual machines, and the card is not counted twice."""
    if not rules.pci_vendor:
        return []
    functions = scan_pci(host, rules.pci_vendor, has_internal_switch=rules.has_internal_switch)
    return [f for f in functions if rules.is_accelerator(f) and not f.is_virtual]


def _has_vendor_node(host: HostProbe, rules: FamilyRules) -> bool:
    node = rules.nodes.vendor_node
    return (bool(node) and host.exists(node)) or is_passed_through(host, rules.nodes)


def _gather(host: HostProbe, rules: FamilyRules, gathered: _Gathered) -> None:
    gathered.build = torch_build(host)
    claims = masquerade_claims(host, gathered.build)
    gathered.foreign = refuse_foreign_claims(host, rules, gathered.functions, claims)
    if gathered.is_sysfs_hidden or any(_has_driver(rules, f) for f in gathered.functions):
        gathered.report = run_tools(host, rules.tools)
    refuse_foreign_addresses(host, rules, gathered.functions, gathered.report)
    if gathered.is_sysfs_hidden:
        _list_without_sysfs(host, rules, gathered)
    bound = [f for f in gathered.functions if gathered.is_sysfs_hidden or _has_driver(rules, f)]
    listed = {device.address for device in gathered.report.devices}
    gathered.findings = node_findings(host, rules.nodes, bound, listed, hardware=rules.hardware)


def _has_driver(rules: FamilyRules, function: PciFunction) -> bool:
    """Whether a kernel driver of the family serves the function; unknown counts as yes where the
    family's drivers are not listed."""
    return function.driver in rules.drivers if rules.drivers else function.driver != "vfio-pci"


def _list_without_sysfs(host: HostProbe, rules: FamilyRules, gathered: _Gathered) -> None:
    """The functions where only the tool, or torch in a child, knows them."""
    addresses = [device.address for device in gathered.report.devices]
    if not addresses and gathered.build is not None and not gathered.report.problem:
        gathered.torch = ask_torch(host, rules.torch_device, rules.software.module)
        addresses = list(gathered.torch.addresses)
    gathered.functions = [
        function_at(host, address)
        for address in dict.fromkeys(a or f"{rules.backend}:{n}" for n, a in enumerate(addresses))
    ]
    if not gathered.functions:
        nodes = card_nodes(host, rules.nodes) if rules.nodes.pattern else []
        said = gathered.report.problem or gathered.report.note
        raise DetectionError(
            f"{rules.hardware} of this host",
            "PCI in sysfs, the vendor's management tool or torch to say which devices there are",
            f"only {', '.join(nodes) or rules.nodes.vendor_node}"
            + (f"; `{gathered.report.command}`: {said}" if said else "")
            + (f"; torch: {gathered.torch.problem}" if gathered.torch.problem else ""),
            "mount /sys into the container, or install a working "
            + (" or ".join(tool.argv[0] for tool in rules.tools) or "tool of the vendor"),
        )


def _conclude(host: HostProbe, rules: FamilyRules, gathered: _Gathered) -> FamilySurvey:
    usable = [
        function
        for function in gathered.functions
        if (finding := gathered.findings.get(function.address)) is not None
        and finding.access is Access.GIVEN
        and not gathered.report.problem
    ]
    listed = gathered.report.devices
    if listed and any(device.address for device in listed):
        usable = [
            f
            for f in usable
            if (found := gathered.report.device_at(f.address))
            and not any(rules.partition_of(device) for device in found)
        ]
    missing = unusable_cards(rules, gathered.functions, usable, gathered.findings, gathered.report)
    if usable:
        software, is_driver_complete = missing_software(
            host, rules, usable, gathered.build, gathered.foreign, gathered.report
        )
        missing += software
        usable = usable if is_driver_complete else []
    cards = _cards(rules, gathered, usable)
    for card in cards:
        refuse_foreign_names(rules, card.sighting)
    return FamilySurvey(
        rules=rules,
        cards=tuple(cards),
        missing=tuple(missing),
        build=gathered.build,
        visibility=_visibility(host, rules, cards),
        report=gathered.report,
        torch=gathered.torch,
    )


def _cards(rules: FamilyRules, gathered: _Gathered, usable: Sequence[PciFunction]) -> list[Card]:
    """In the driver's order where the tool tells it, else by address."""
    cards: list[tuple[tuple[int, str], Card]] = []
    without_address = [d for d in gathered.report.devices if not d.address]
    for position, function in enumerate(usable):
        devices = gathered.report.device_at(function.address)
        if not devices and len(without_address) == len(usable):
            devices = [without_address[position]]
        for number, tool in enumerate(devices or [None]):
            is_one = len(devices) < 2
            sighting = Sighting(function=function, tool=tool)
            card = Card(
                device_id=function.address if is_one else f"{function.address}#{number}",
                sighting=sighting,
                evidence=_evidence(rules, gathered, sighting),
            )
            cards.append(((tool.index if tool else 0, card.device_id), card))
    return [card for _, card in sorted(cards, key=lambda pair: pair[0])]


def _evidence(rules: FamilyRules, gathered: _Gathered, sighting: Sighting) -> tuple[Evidence, ...]:
    """In the order in which it was taken."""
    function, tool = sighting.function, sighting.tool
    found = []
    if function.device:
        driver = f", driver {function.driver}" if function.driver else ""
        shown = f"{function.id}, class {function.class_code}{driver}"
        found.append(Evidence(source=f"/sys/bus/pci/devices/{function.address}", found=shown))
    nodes = gathered.findings.get(function.address)
    if nodes is not None and nodes.nodes:
        found.append(Evidence(source="device nodes", found=nodes.nodes))
    if gathered.build is not None:
        found.append(gathered.build.evidence)
    found += [claim.evidence for claim in gathered.foreign]
    if gathered.report.note:
        source = f"command {gathered.report.command}"
        found.append(Evidence(source=source, found=gathered.report.note))
    if tool is not None:
        shown = f"{tool.name or 'no name'}, index {tool.index}"
        if tool.memory_bytes:
            shown += f", {tool.memory_bytes >> 20} MiB"
        found.append(Evidence(source=f"command {gathered.report.command}", found=shown))
    return tuple(found)


def _visibility(host: HostProbe, rules: FamilyRules, cards: Sequence[Card]) -> Visibility:
    selectable = []
    key = rules.visible.selects_by
    has_tool = bool(cards) and all(card.sighting.tool is not None for card in cards)
    for number, card in enumerate(cards):
        tool = card.sighting.tool
        named = tool.details.get(key, "") if tool is not None and key else ""
        selectable.append(
            Selectable(
                key=card.device_id,
                number=int(named) if named.isascii() and named.isdigit() else number,
                uuid=tool.details.get("uuid", "") if tool is not None else "",
                model=card.sighting.function.device or (tool.name if tool is not None else ""),
            )
        )
    is_known = has_tool or rules.visible.is_pci_order or len(cards) == 1
    return visibility(host, rules.visible, selectable, is_order_known=is_known)


def with_torch(host: HostProbe, survey: FamilySurvey) -> FamilySurvey:
    """The survey with what torch says of the devices; asked in a child process.

    Raises:
        DetectionError: torch and PCI name different vendors.
        HostReadError: torch did not come to an end.
    """
    rules = survey.rules
    report = survey.torch
    if not report.was_asked:
        report = ask_torch(host, rules.torch_device, rules.software.module)
    cards = []
    for card in survey.cards:
        ordinal = survey.visibility.ordinals.get(card.device_id)
        sighting = card.sighting
        evidence = card.evidence
        if ordinal is not None and ordinal < len(report.names):
            sighting = replace(
                sighting,
                torch_name=report.names[ordinal],
                torch_capability=report.capabilities[ordinal],
            )
            shown = f"{sighting.torch_name} {sighting.torch_capability}".strip()
            evidence = (*evidence, Evidence(source="torch in a child process", found=shown))
            refuse_foreign_names(rules, sighting)
        cards.append(replace(card, sighting=sighting, evidence=evidence))
    return replace(survey, cards=tuple(cards), torch=report)
