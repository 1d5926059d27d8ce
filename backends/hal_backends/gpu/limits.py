"""Reasons of candidates on accelerators: each limit is keyed by what it tests.

A feature that only an unverified source claims is UNVERIFIED, one that nobody claims is HARDWARE.
An architecture is a member of a stated set, never "at least" some number: a newer chip of another
family may lack what the older one had.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hal.device import DeviceSpec
from hal.reasons import Reason, ReasonKind


def gather(*parts: Sequence[Reason]) -> list[Reason]:
    return [reason for part in parts for reason in part]


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


def one_of(what: str, found: object, allowed: Collection[object]) -> list[Reason]:
    """A limit of the kernel: values that it is compiled for."""
    required = " or ".join(str(value) for value in allowed)
    return limit(what, found, required, is_met=found in allowed)


def multiple(what: str, found: int, of: int) -> list[Reason]:
    return limit(what, found, f"a multiple of {of}", is_met=found % of == 0)


def at_most(what: str, found: int | float, most: int | float) -> list[Reason]:
    return limit(what, found, f"at most {most}", is_met=found <= most)


def flag(what: str, found: bool, *, required: bool) -> list[Reason]:
    """An option of the request that the kernel has, or that it cannot do without."""
    return limit(what, str(found).lower(), str(required).lower(), is_met=found == required)


def feature(device: DeviceSpec, *needed: str) -> list[Reason]:
    """Each of these features, one reason for each that is absent or that nobody verified; "" is
    none at all."""
    reasons = []
    for name in needed:
        if not name or name in device.features:
            continue
        unverified = name in device.unverified_features
        reasons.append(
            Reason(
                what=name,
                required=f"{name} of {device.arch}, verified" if unverified else name,
                found="claimed by an unverified source only"
                if unverified
                else f"not on {device.arch}",
                kind=ReasonKind.UNVERIFIED if unverified else ReasonKind.HARDWARE,
            )
        )
    return reasons


def any_feature(device: DeviceSpec, *choices: str) -> list[Reason]:
    """At least one of these features."""
    if any(name in device.features for name in choices):
        return []
    claimed = [name for name in choices if name in device.unverified_features]
    return [
        Reason(
            what="features",
            required=" or ".join(choices) + (", verified" if claimed else ""),
            found=f"{', '.join(claimed)} claimed by an unverified source only"
            if claimed
            else f"none of them on {device.arch}",
            kind=ReasonKind.UNVERIFIED if claimed else ReasonKind.HARDWARE,
        )
    ]


def architecture(device: DeviceSpec, allowed: Collection[str], *, why: str) -> list[Reason]:
    """The device's architecture is one that the kernel is compiled for.

    why: what ties the kernel to them, e.g. "uses wgmma".
    """
    if device.arch in allowed:
        return []
    return [
        Reason(
            what="arch",
            required=f"{' or '.join(allowed)} ({why})",
            found=device.arch or "not known",
            kind=ReasonKind.HARDWARE,
        )
    ]


def claimed_architecture(
    device: DeviceSpec, allowed: Collection[str], claimed: Collection[str], *, why: str
) -> list[Reason]:
    """As `architecture`; on those in `claimed` only an unverified source says that it works."""
    if device.arch not in claimed:
        return architecture(device, allowed, why=why)
    return [
        Reason(
            what="arch",
            required=f"{' or '.join(allowed)} ({why}), or {device.arch} verified",
            found=f"{device.arch}, claimed only",
            kind=ReasonKind.UNVERIFIED,
        )
    ]


def software(
    device: DeviceSpec, distribution: str, versions: str = "", *, install: str = ""
) -> list[Reason]:
    """The distribution is installed beside the device, in one of these versions (PEP 440).

    install: how to get it, for the reason; `pip install` of the requirement if it is empty. A
    version that has no PEP 440 form counts as unknown and does not satisfy a range.
    """
    found = device.software.get(distribution)
    requirement = f"{distribution}{versions}"
    if found is not None and (not versions or _satisfies(found, versions)):
        return []
    return [
        Reason(
            what="software",
            required=f"{requirement} ({install or f'pip install {requirement!r}'})",
            found="not installed" if found is None else found,
            kind=ReasonKind.SOFTWARE,
        )
    ]


def _satisfies(found: str, versions: str) -> bool:
    try:
        # Builds are marked behind the number ("2.8.3+metax3.8"), which the range does not mean.
        version = Version(Version(found).public)
    except InvalidVersion:
        return False
    return SpecifierSet(versions).contains(version, prereleases=True)


def build_tag(device: DeviceSpec, distribution: str, tag: str, *, install: str) -> list[Reason]:
    """The installed build is the vendor's own: its version carries `tag` ("+metax…")."""
    found = device.software.get(distribution)
    if found is not None and tag in found:
        return []
    return [
        Reason(
            what="software",
            required=f"{distribution} built for this platform, version with {tag!r} ({install})",
            found="not installed" if found is None else found,
            kind=ReasonKind.SOFTWARE,
        )
    ]


def missing_kernel(module: str) -> list[Reason]:
    """The kernel's module is there; the module itself is not imported, only its packages."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is not there either
        is_there = False
    if is_there:
        return []
    return [
        Reason(what="kernel", required=module, found="not written yet", kind=ReasonKind.MISSING)
    ]
