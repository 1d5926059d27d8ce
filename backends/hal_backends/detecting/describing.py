"""Detected devices and their specifications: database values of the product, overlaid with what
was probed on this host, each with its evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hal.device import Confidence, DetectedDevice, DeviceSpec, Evidence, MissingDependency
from hal.errors import DetectionError
from hal.host import HostProbe, LocalHost
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.survey import Card, FamilySurvey, survey_family, with_torch

if TYPE_CHECKING:
    from hal_backends.detecting.identity import Identity
    from hal_capability_db import Database

# Versions that decide what can run on any accelerator; a family adds its own.
_PACKAGES = ("torch", "triton")
# Keys of `FamilyRules.refine` and of a tool's details that are no attributes of a specification.
_NOT_ATTRIBUTES = frozenset({"name", "arch", "memory_bytes", "num_cores", "uuid", "driver"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A family on a host, looked at once."""

    host: HostProbe
    survey: FamilySurvey
    identities: Mapping[str, Identity]


_looks: dict[str, _Look] = {}


def _look(host: HostProbe, rules: FamilyRules) -> _Look:
    """What is on `host`. Kept for as long as the same host is asked about: the hooks of one plug-in
    come one after the other, and a tool takes seconds."""
    kept = _looks.get(rules.backend)
    if kept is not None and kept.host is host:
        return kept
    survey = survey_family(host, rules)
    identities: Mapping[str, Identity] = {}
    if survey.cards and survey.error is None:
        survey, identities = _identified(host, survey)
    look = _Look(host=host, survey=survey, identities=identities)
    _looks[rules.backend] = look
    return look


def _identified(
    host: HostProbe, survey: FamilySurvey
) -> tuple[FamilySurvey, Mapping[str, Identity]]:
    from hal.errors import UserError
    from hal_backends.detecting.identity import identify

    try:
        database = known_devices()
        found = {c.device_id: identify(host, survey.rules, c, database) for c in survey.cards}
        # Without a tool only torch knows the name; it is asked only if the PCI id is not enough.
        is_open = any(i.profile is None for i in found.values()) and not survey.report.command
        if is_open and survey.build is not None and not survey.missing:
            survey = with_torch(host, survey)
            found = {c.device_id: identify(host, survey.rules, c, database) for c in survey.cards}
    except UserError as error:
        return replace(survey, cards=(), error=error), {}
    return survey, found


def known_devices() -> Database:
    """The capability database under the user's overlays (`database.overlays`). Read late: a host
    without accelerators needs neither.

    Raises:
        DatabaseError, SettingsError: a file of devices or of settings is refused.
    """
    from hal.settings import Settings
    from hal_capability_db import load_database
    from hal_capability_db.settings import DatabaseSettings

    section = Settings.read().section("database", DatabaseSettings, consumer="device detection")
    return load_database(section.overlays)


def detect_devices(host: HostProbe, rules: FamilyRules) -> Sequence[DetectedDevice]:
    """The family's devices that this process can use, hidden ones included.

    Raises:
        DetectionError: evidence contradicts itself, or hardware is here and cannot be told.
        HostReadError: a file cannot be read, or a tool did not come to an end.
    """
    look = _look(host, rules)
    if look.survey.error is not None:
        raise look.survey.error
    return [
        DetectedDevice(
            device_id=card.device_id,
            vendor=rules.vendor,
            name=look.identities[card.device_id].name,
            arch=look.identities[card.device_id].arch or "unknown",
            evidence=_device_evidence(look.survey, card, look.identities[card.device_id]),
        )
        for card in look.survey.cards
    ]


def missing_dependencies(host: HostProbe, rules: FamilyRules) -> Sequence[MissingDependency]:
    """What is missing beside hardware that is here. What detection refuses, it raises."""
    survey = _look(host, rules).survey
    problem = survey.torch.problem
    if not problem:
        return survey.missing
    return (
        *survey.missing,
        MissingDependency(
            hardware=rules.hardware,
            software=f"a torch that finds it: {problem}",
            remedy=rules.software.driver_remedy,
            evidence=(Evidence(source="torch in a child process", found=problem),),
        ),
    )


def describe_device(device: DetectedDevice, host: HostProbe, rules: FamilyRules) -> DeviceSpec:
    """The specification of a device that `detect_devices` found.

    Raises:
        DetectionError: the device is not there any more, or neither its product nor its
            architecture is known.
    """
    from hal_backends.gpu.spec import device_spec

    look = _look(host, rules)
    card = next((c for c in look.survey.cards if c.device_id == device.device_id), None)
    if card is None:
        raise look.survey.error or DetectionError(
            f"{rules.hardware} {device.device_id}",
            "the device that was detected",
            "it is not there any more",
            "run `hal doctor`; a card that vanished needs a reset or a reboot",
        )
    identity = look.identities[card.device_id]
    database = known_devices()
    profile = identity.profile
    if profile is None:
        if not identity.arch:
            raise _unknown_device(rules, card, identity)
        from hal_backends.detecting.by_architecture import profile_by_architecture

        profile = profile_by_architecture(rules, identity, database)
    spec = device_spec(
        profile,
        device_id=card.device_id,
        backend=rules.backend,
        software=installed_software(host, rules),
        database=database,
    )
    return _with_probed(spec, rules, look.survey, card, identity)


def device_profiles(rules: FamilyRules, host: HostProbe | None = None) -> Sequence[DeviceSpec]:
    """Every product of the family, with torch and Triton as they are here."""
    from hal_backends.gpu.spec import device_spec

    database = known_devices()
    host = host or LocalHost()
    software = {name: v for name in _PACKAGES if (v := host.package_version(name)) is not None}
    return [
        device_spec(
            profile,
            device_id=profile.id,
            backend=rules.backend,
            software=software,
            database=database,
        )
        for profile in database.devices.values()
        if profile.family == rules.family
    ]


def installed_software(host: HostProbe, rules: FamilyRules) -> dict[str, str]:
    """Distribution -> version of what is installed and matters to the family."""
    names = (*_PACKAGES, rules.software.module, *rules.software.packages)
    versions = {name: host.package_version(name) for name in names if name}
    return {name: version for name, version in versions.items() if version is not None}


def _unknown_device(rules: FamilyRules, card: Card, identity: Identity) -> DetectionError:
    function = card.sighting.function
    shown = function.id if function.device else card.device_id
    return DetectionError(
        f"{rules.hardware} {card.device_id}",
        "a product or an architecture that the capability database knows",
        f"{identity.name} ({shown}), decided by {identity.basis or 'nothing'}",
        f"add it to an overlay of the capability database: a device of family {rules.family!r} "
        f"with this PCI id and name (`hal db validate` checks it)",
    )


def _device_evidence(survey: FamilySurvey, card: Card, identity: Identity) -> tuple[Evidence, ...]:
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


def _with_probed(
    spec: DeviceSpec, rules: FamilyRules, survey: FamilySurvey, card: Card, identity: Identity
) -> DeviceSpec:
    """The specification with what was seen on this host, which is more than the product's."""
    attributes: dict[str, str | int | float] = dict(spec.attributes)
    evidence = dict(spec.evidence)
    for number, seen in enumerate(_device_evidence(survey, card, identity), 1):
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
    attributes["host_link"] = link.best
    attributes["host_link_trained"] = link.trained
    attributes["host_link_bytes_per_s"] = link.bytes_per_s
    note = ""
    if link.is_narrow:
        note = "; lanes are missing: reseat the card, or look for a narrower slot or riser"
    elif link.is_slow:
        note = "; an idle link lowers its speed, look again under load"
    found = f"trained {link.trained} of {link.best}{note}"
    for key in ("host_link", "host_link_trained", "host_link_bytes_per_s"):
        evidence[f"attributes.{key}"] = Evidence(source=f"{source}/current_link_*", found=found)


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
