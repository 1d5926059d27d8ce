"""Detected devices and their specifications, as the hooks answer them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.device import DetectedDevice, DeviceSpec, Evidence, MissingDependency
from hal.errors import DetectionError
from hal.host import HostProbe, LocalHost
from hal_backends.detecting.look import look_at_family
from hal_backends.detecting.rules import FamilyRules
from hal_backends.detecting.survey import Card
from hal_backends.gpu.software import TESTED_VERSIONS

if TYPE_CHECKING:
    from hal_backends.detecting.identity import Identity

# Versions that decide what can run on any accelerator; a family adds its own.
_PACKAGES = ("torch", "triton", *TESTED_VERSIONS)


def detect_devices(host: HostProbe, rules: FamilyRules) -> Sequence[DetectedDevice]:
    """The family's devices that this process can use, hidden ones included.

    Raises:
        DetectionError: evidence contradicts itself, or hardware is here and cannot be told.
        HostReadError: a file cannot be read, or a tool did not come to an end.
    """
    look = look_at_family(host, rules)
    if look.survey.error is not None:
        raise look.survey.error
    if not look.survey.cards:
        return []
    from hal_backends.detecting.probed import device_evidence

    return [
        DetectedDevice(
            device_id=card.device_id,
            vendor=rules.vendor,
            name=look.identities[card.device_id].name,
            arch=look.identities[card.device_id].arch or "unknown",
            evidence=device_evidence(look.survey, card, look.identities[card.device_id]),
        )
        for card in look.survey.cards
    ]


def missing_dependencies(host: HostProbe, rules: FamilyRules) -> Sequence[MissingDependency]:
    """What is missing beside hardware that is here. What detection refuses, it raises."""
    survey = look_at_family(host, rules).survey
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
    from hal_backends.detecting.probed import with_probed
    from hal_backends.gpu.spec import device_spec
    from hal_capability_db import load_database

    look = look_at_family(host, rules)
    card = next((c for c in look.survey.cards if c.device_id == device.device_id), None)
    if card is None:
        raise look.survey.error or DetectionError(
            f"{rules.hardware} {device.device_id}",
            "the device that was detected",
            "it is not there any more",
            "run `hal doctor`; a card that vanished needs a reset or a reboot",
        )
    identity = look.identities[card.device_id]
    database = load_database()
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
    return with_probed(spec, rules, look, card)


def device_profiles(rules: FamilyRules, host: HostProbe | None = None) -> Sequence[DeviceSpec]:
    """Every product of the family, with torch and Triton as they are here."""
    from hal_backends.gpu.spec import device_spec
    from hal_capability_db import load_database

    database = load_database()
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
