"""Reasons of CPU candidates: the small vocabulary in which limits are stated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.reasons import Reason, ReasonKind

Check = Callable[[Any], Iterable[Reason]]


def scope(what: str, found: object, allowed: Collection[object]) -> list[Reason]:
    """The candidate is for these values of an argument and not meant for others."""
    if found in allowed:
        return []
    required = " or ".join(str(value) for value in allowed)
    return [Reason(what=what, required=required, found=str(found), kind=ReasonKind.SCOPE)]


def limit(what: str, found: object, required: str, *, is_met: bool) -> list[Reason]:
    """A limit of the kernel within what it is meant for."""
    if is_met:
        return []
    return [Reason(what=what, required=required, found=str(found), kind=ReasonKind.ARGUMENT)]


def features(device: DeviceSpec, *needed: str) -> list[Reason]:
    """Instruction-set flags that the device must have, all of them."""
    missing = [flag for flag in needed if flag not in device.features]
    if not missing:
        return []
    return [
        Reason(
            what="cpu flags",
            required=" ".join(needed),
            found=f"without {' '.join(missing)}",
            kind=ReasonKind.HARDWARE,
        )
    ]


def any_feature(device: DeviceSpec, *choices: str) -> list[Reason]:
    """At least one of these instruction-set flags."""
    if any(flag in device.features for flag in choices):
        return []
    return [
        Reason(
            what="cpu flags",
            required=" or ".join(choices),
            found="none of them",
            kind=ReasonKind.HARDWARE,
        )
    ]


def gather(*parts: Sequence[Reason]) -> list[Reason]:
    return [reason for part in parts for reason in part]


def vector_unit(device: DeviceSpec) -> list[Reason]:
    """What kernels compiled on this machine need."""
    return features(device, "avx2", "fma")
