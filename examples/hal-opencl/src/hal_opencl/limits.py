"""The limits of the kernels as reasons, and the rule for their tiers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hal.device import DeviceSpec
from hal.reasons import Reason, ReasonKind
from hal.tiers import Tier


def tier_of(device: DeviceSpec) -> Tier:
    """Tuned where the kernels were written for the device and measured on one like it: a CPU that
    shares its memory. Anywhere else they are right and nobody knows how fast: portable. Never
    native: OpenCL C does not say which instructions it becomes."""
    fits = {"unit.cpu", "memory.shared"} <= device.features
    return Tier.TUNED if fits else Tier.PORTABLE


def scope(what: str, found: object, allowed: Collection[object]) -> list[Reason]:
    """The kernel is for these values of an argument and not meant for others."""
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
    """What the device must have, all of it."""
    return [
        Reason(
            what="OpenCL device", required=name, found=f"without {name}", kind=ReasonKind.HARDWARE
        )
        for name in needed
        if name not in device.features
    ]


def gather(*parts: Sequence[Reason]) -> list[Reason]:
    return [reason for part in parts for reason in part]
