"""Which devices this process may use, by the vendors' environment variables.

The vendors' runtimes end a list at its first wrong entry and say nothing; here a wrong entry is an
error, for a device that vanished from a list is a slower run that nobody ordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal.device import Evidence
from hal.errors import DetectionError
from hal.host import HostProbe
from hal_backends.detecting.rules import VisibleRule

_NONE_AT_ALL = frozenset({"", "-1", "none", "void", "nodevfiles"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Selectable:
    """A device that a variable may name: by its ordinal, or by a name of its own."""

    key: str  # device id
    number: int  # what a number in the variable means
    uuid: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """ordinals: device id -> index in this process; None where it is not known. A device that is
    not in it is hidden, by `variables`."""

    ordinals: Mapping[str, int | None]
    variables: str = ""
    evidence: Evidence | None = None


def visibility(
    host: HostProbe, rule: VisibleRule, devices: Sequence[Selectable], *, is_order_known: bool
) -> Visibility:
    """The devices of this process, from all of the family's `devices`, in the driver's order.

    Raises:
        DetectionError: a variable is malformed, names a device that is not there or names one
            twice, two synonyms differ, or the order that the numbers mean is not known.
    """
    settings = [setting for layer in rule.layers if (setting := _setting(host, layer)) is not None]
    has_order = is_order_known and _is_ordered(host, rule, devices)
    if not settings:
        known = enumerate(devices) if has_order else ((None, device) for device in devices)
        return Visibility(ordinals={device.key: number for number, device in known})
    left = list(devices)
    for variable, value in settings:
        # Once reordered, the entries of the next layer count what is left.
        numbered = left if left == list(devices) else _renumbered(left)
        left = _selected(variable, value, numbered, rule, has_order=has_order)
    shown = " ".join(f"{variable}={value}" for variable, value in settings)
    found = f"{value or 'empty'}" if len(settings) == 1 else shown
    return Visibility(
        ordinals={device.key: number for number, device in enumerate(left)},
        variables=shown,
        evidence=Evidence(source=f"environment {settings[0][0]}", found=found),
    )


def _setting(host: HostProbe, names: Sequence[str]) -> tuple[str, str] | None:
    """The variable of a layer that is set. Synonyms must agree."""
    found = [(name, value.strip()) for name in names if (value := host.environ(name)) is not None]
    if len({value for _, value in found}) > 1:
        raise DetectionError(
            "environment",
            f"{' and '.join(name for name, _ in found)} with one value, as they mean the same",
            ", ".join(f"{name}={value}" for name, value in found),
            f"unset all but {found[0][0]}",
        )
    return found[0] if found else None


def _is_ordered(host: HostProbe, rule: VisibleRule, devices: Sequence[Selectable]) -> bool:
    variable, value = rule.order_variable
    is_uniform = len({device.model for device in devices}) <= 1
    return not variable or is_uniform or host.environ(variable) == value


def _renumbered(devices: Sequence[Selectable]) -> list[Selectable]:
    return [
        Selectable(key=device.key, number=number, uuid=device.uuid, model=device.model)
        for number, device in enumerate(devices)
    ]


def _selected(
    variable: str, value: str, devices: Sequence[Selectable], rule: VisibleRule, *, has_order: bool
) -> list[Selectable]:
    if value.lower() in _NONE_AT_ALL:
        return []
    selected: list[Selectable] = []
    for entry in (part.strip() for part in value.split(",")):
        device = _named(variable, value, entry, devices, rule, has_order=has_order)
        if device in selected:
            raise _refused(variable, value, "each device once", f"{entry} twice", "remove one")
        selected.append(device)
    return selected


def _named(
    variable: str,
    value: str,
    entry: str,
    devices: Sequence[Selectable],
    rule: VisibleRule,
    *,
    has_order: bool,
) -> Selectable:
    if entry.isascii() and entry.isdigit():
        if not has_order:
            order, setting = rule.order_variable
            remedy = f"set {order}={setting}" if order else "name the devices by UUID"
            required = "a known order of the devices that the numbers count"
            raise _refused(variable, value, required, "devices of several models", remedy)
        found = [device for device in devices if device.number == int(entry)]
        numbers = ", ".join(str(device.number) for device in devices)
        required = f"numbers of devices that are here: {numbers or 'none'}"
    else:
        found = [device for device in devices if device.uuid and device.uuid.startswith(entry)]
        required = "numbers or UUIDs of whole devices that are here"
        if entry and not any(device.uuid for device in devices):
            required += ", and a tool that tells the UUIDs"
    if not entry or len(found) != 1:
        remedy = f"correct {variable}, or unset it to use every device"
        raise _refused(variable, value, required, repr(entry), remedy)
    return found[0]


def _refused(variable: str, value: str, required: str, found: str, remedy: str) -> DetectionError:
    return DetectionError(
        f"environment variable {variable}", required, f"{found} in {value!r}", remedy
    )
