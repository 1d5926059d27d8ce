"""The device of a plan: one of this host, or one that a plug-in knows and that is not here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from packaging.version import InvalidVersion, Version

from hal.device import DeviceSpec
from hal.errors import DeviceNotFoundError, SettingsError
from hal.host_probe import normalised_distribution
from hal.ops import CATALOGUE
from hal.plugins.registry import BackendRegistry
from hal.suggestions import did_you_mean

MAX_GROUP = 64
_DISTRIBUTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COUNT = re.compile(r"x([0-9]{1,4})")
_GROUP = re.compile(r"(?P<name>.*?)(?::|\s+)x(?P<count>[0-9]{1,4})")


def parse_count(text: str) -> int:
    """`x8` as 8. Raises SettingsError for anything else or a size out of 1 to 64."""
    found = _COUNT.fullmatch(text)
    if found is None or not 1 <= int(found[1]) <= MAX_GROUP:
        raise SettingsError(
            "number of devices", f"x1 to x{MAX_GROUP}", repr(text), "write it as x8, after MODEL"
        )
    return int(found[1])


def parse_group(text: str) -> tuple[str, int | None]:
    """`NAME`, `NAME x8` or `NAME:x8` as a name and a number of devices, None if not given."""
    found = _GROUP.fullmatch(text.strip())
    if found is None:
        return text.strip(), None
    return found["name"].strip(), parse_count(f"x{found['count']}")


def parse_software(assignments: Sequence[str]) -> dict[str, str]:
    """`NAME=VERSION` entries. Raises SettingsError for another form, a version that is none
    (PEP 440), or a name given twice, however it is spelled."""
    software: dict[str, str] = {}
    for text in assignments:
        name, separator, version = (part.strip() for part in text.partition("="))
        name = normalised_distribution(name)
        if not separator or not name or not _is_version(version) or name in software:
            raise SettingsError(
                "option --with", "NAME=VERSION, each name once", repr(text), "e.g. flash-attn=2.8.3"
            )
        software[name] = version
    return software


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def present_device(registry: BackendRegistry, device_id: str) -> DeviceSpec:
    """The device of this host that is asked for, or the only one that is not a CPU, or the CPU.

    A second way to the silicon of another device is used only where it is named. Raises
    DeviceNotFoundError if there is none, or several and none was named.
    """
    if device_id:
        return registry.describe(device_id)
    specs = _distinct_silicon(registry)
    accelerators = [spec for spec in specs if spec.torch_device != "cpu"]
    choices = accelerators or specs
    if len(choices) == 1:
        return choices[0]
    raise DeviceNotFoundError(
        "choice of a device",
        "exactly one device, or --device",
        ", ".join(spec.device_id for spec in choices) or "no device",
        "name one with --device; `hal doctor` shows what became of every plug-in",
    )


def device_or_profile(
    registry: BackendRegistry, name: str, software: Mapping[str, str]
) -> DeviceSpec:
    """As `present_device`; a name that is not of this host may be one that a plug-in knows.

    software: distribution -> version, taken to be installed beside an absent device.
    Raises DeviceNotFoundError; SettingsError for `software` beside a device that is here.
    """
    if not name or name in {device.device_id for device in registry.devices}:
        if software:
            raise SettingsError(
                "option --with",
                "a device that is not here",
                name or "a device of this host, whose software is known",
                "leave --with out, or install the software",
            )
        return present_device(registry, name)
    spec = registry.profile(name)
    return dataclasses.replace(spec, software={**spec.software, **software})


def check_software(
    registry: BackendRegistry, specs: Sequence[DeviceSpec], software: Mapping[str, str]
) -> None:
    """Raises SettingsError for a distribution that no implementation for any of these devices asks
    about: it would change nothing, and is most likely another name misspelt."""
    if not software:
        return
    known = {name for spec in specs for name in known_software(registry, spec)}
    for name in software:
        if name not in known:
            raise SettingsError(
                "option --with",
                "a distribution that some implementation for the device asks about",
                f"{name}, of which none of them knows",
                did_you_mean(name, known) or f"known: {', '.join(sorted(known))}",
            )


def known_software(registry: BackendRegistry, spec: DeviceSpec) -> set[str]:
    """Distributions that implementations for the device ask about, as they declare it, and those
    that are known to be beside it."""
    names = {normalised_distribution(name) for name in ("torch", *spec.software)}
    for op in CATALOGUE:
        for candidate in registry.candidates(op, spec):
            for requirement in candidate.requires_software:
                found = _DISTRIBUTION.match(requirement)
                if found is not None:
                    names.add(normalised_distribution(found.group()))
    return names


def present_group(registry: BackendRegistry) -> tuple[DeviceSpec, int]:
    """All accelerators of a host as one group: the first of them, and how many.

    Raises DeviceNotFoundError if they are not of one kind: a group plan is for equal devices.
    """
    specs = _distinct_silicon(registry)
    specs = [spec for spec in specs if spec.torch_device != "cpu"] or specs
    kinds = {(spec.backend, spec.arch, spec.name, spec.memory_bytes) for spec in specs}
    if len(kinds) != 1:
        raise DeviceNotFoundError(
            "group of all devices",
            "devices of one kind",
            ", ".join(f"{spec.device_id} {spec.name}" for spec in specs) or "no device",
            "name one with --device",
        )
    return specs[0], len(specs)


def _distinct_silicon(registry: BackendRegistry) -> list[DeviceSpec]:
    """Every device but those that are hidden from this process (CUDA_VISIBLE_DEVICES and its like)
    and those that say that they are the silicon of another one that is here."""
    specs = [registry.describe(device.device_id) for device in registry.devices]
    specs = [spec for spec in specs if "hidden_by" not in spec.attributes]
    present = {spec.device_id for spec in specs}
    return [spec for spec in specs if spec.attributes.get("same_silicon_as") not in present]
