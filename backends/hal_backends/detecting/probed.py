"""What was seen of a device on this host, over what the database says of its product."""

from __future__ import annotations

from dataclasses import replace

from hal.device import Confidence, DeviceSpec, Evidence
from hal_backends.detecting.fabric import Fabric
from hal_backends.detecting.identity import Identity
from hal_backends.detecting.look import Look
from hal_backends.detecting.pci import link_text
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.survey import Card, FamilySurvey

# Keys of `FamilyRules.refine` and of a tool's details that are no attributes of a specification.
_NOT_ATTRIBUTES = frozenset({"name", "arch", "memory_bytes", "num_cores", "uuid", "driver"})


def device_evidence(survey: FamilySurvey, card: Card, identity: Identity) -> tuple[Evidence, ...]:
    found = [*card.evidence]
    if survey.visibility.evidence is not None:
        is_hidden = card.device_id not in survey.visibility.ordinals
        seen = survey.visibility.evidence
        shown = f"{seen.found}: {'hides it' if is_hidden else 'shows it'}"
        found.append(Evidence(source=seen.source, found=shown))
    profile = identity.profile.id if identity.profile is not None else "no product"
    found.append(
        Evidence(
            source="capability database",
            found=f"{profile}, by {identity.basis or 'nothing'}",
            confidence=Confidence.DATABASE,
        )
    )
    return tuple(found)


def with_probed(spec: DeviceSpec, rules: FamilyRules, look: Look, card: Card) -> DeviceSpec:
    """The specification with what was seen on this host, which is more than the product's."""
    survey, identity = look.survey, look.identities[card.device_id]
    attributes: dict[str, str | int | float] = dict(spec.attributes)
    evidence = dict(spec.evidence)
    for number, seen in enumerate(device_evidence(survey, card, identity), 1):
        evidence[f"detection.{number}"] = seen
    _place(card, attributes, evidence)
    ordinal = _ordinal(rules, survey, card, attributes, evidence)
    memory_bytes = _probed_memory(survey, card, identity, evidence) or spec.memory_bytes
    tool = card.sighting.tool
    details = {**(tool.details if tool is not None else {}), **identity.details}
    for key, value in details.items():
        if key not in _NOT_ATTRIBUTES:
            attributes[key] = int(value) if value.isascii() and value.isdigit() else value
            evidence[f"attributes.{key}"] = _probe_evidence(survey, card, value)
    if look.fabric is not None:
        _fabric(look.fabric, card, attributes, evidence)
    if details.get("driver"):
        attributes["driver_version"] = details["driver"]
        evidence["attributes.driver_version"] = _probe_evidence(survey, card, details["driver"])
    device = rules.torch_device if ordinal is None else f"{rules.torch_device}:{ordinal}"
    return replace(
        spec,
        vendor=rules.vendor,
        name=identity.name,
        torch_device=device,
        num_cores=int(details.get("num_cores", spec.num_cores)),
        memory_bytes=memory_bytes,
        attributes=attributes,
        evidence=evidence,
    )


def _probe_evidence(survey: FamilySurvey, card: Card, found: str) -> Evidence:
    source = f"command {survey.report.command}" if survey.report.command else "/sys, /proc"
    return Evidence(source=source, found=found)


def _place(
    card: Card, attributes: dict[str, str | int | float], evidence: dict[str, Evidence]
) -> None:
    """Where the card is on the host: address, NUMA node, link as wired and as trained."""
    function = card.sighting.function
    attributes["pci_address"] = function.address
    source = f"/sys/bus/pci/devices/{function.address}"
    if function.numa_node >= 0:
        attributes["numa_node"] = function.numa_node
        evidence["attributes.numa_node"] = Evidence(
            source=f"{source}/numa_node", found=str(function.numa_node)
        )
    link = function.link
    if link is None:
        return
    best = link_text(link.best_speed or link.speed, link.best_width or link.width)
    trained = link_text(link.speed, link.width)
    attributes["host_link"] = best
    attributes["host_link_trained"] = trained
    attributes["host_link_bytes_per_s"] = link.bytes_per_s
    found = "; ".join((f"trained {trained} of {best}", *link.findings()))
    for key in ("host_link", "host_link_trained", "host_link_bytes_per_s"):
        evidence[f"attributes.{key}"] = Evidence(source=f"{source}/current_link_*", found=found)


def _fabric(
    fabric: Fabric,
    card: Card,
    attributes: dict[str, str | int | float],
    evidence: dict[str, Evidence],
) -> None:
    """The links of this card, in place of those that its product may have."""
    peers = fabric.peers.get(card.device_id, {})
    shown = " ".join(f"{peer}*{n}" if n else peer for peer, n in peers.items())
    evidence["attributes.fabric"] = Evidence(source=fabric.source, found=shown or "no link")
    if not peers:
        attributes["fabric"] = "none"
        attributes.pop("fabric_bytes_per_s", None)
        evidence.pop("attributes.fabric_bytes_per_s", None)
        return
    attributes["fabric"] = fabric.name
    attributes["fabric_peers"] = shown
    others = len(fabric.peers) - 1
    is_full_mesh = all(len(linked) == others for linked in fabric.peers.values())
    attributes["fabric_is_full_mesh"] = int(is_full_mesh)


def _ordinal(
    rules: FamilyRules,
    survey: FamilySurvey,
    card: Card,
    attributes: dict[str, str | int | float],
    evidence: dict[str, Evidence],
) -> int | None:
    """The device's index in this process as `visible_ordinal`: -1 for a hidden device, absent where
    the runtime's order cannot be known."""
    seen = survey.visibility
    if card.device_id not in seen.ordinals:
        attributes["visible_ordinal"] = -1
        attributes["hidden_by"] = seen.variables
        if seen.evidence is not None:
            evidence["attributes.visible_ordinal"] = seen.evidence
        return None
    ordinal = seen.ordinals[card.device_id]
    variable, value = rules.visible.order_variable
    if ordinal is None:
        evidence["attributes.visible_ordinal"] = Evidence(
            source="order of the devices",
            found=f"not known: set {variable}={value}"
            if variable
            else "not known without the tool",
            confidence=Confidence.UNVERIFIED,
        )
        return None
    attributes["visible_ordinal"] = ordinal
    source = seen.evidence.source if seen.evidence is not None else "order of the devices"
    evidence["attributes.visible_ordinal"] = Evidence(source=source, found=str(ordinal))
    return ordinal


def _probed_memory(
    survey: FamilySurvey, card: Card, identity: Identity, evidence: dict[str, Evidence]
) -> int:
    memory = int(identity.details.get("memory_bytes", 0))
    source = "/sys, /proc"
    if not memory and card.sighting.tool is not None:
        memory, source = card.sighting.tool.memory_bytes, f"command {survey.report.command}"
    if memory:
        evidence["memory_bytes"] = Evidence(source=source, found=f"{memory} B")
    return memory
