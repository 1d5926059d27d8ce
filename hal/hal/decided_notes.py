"""What a plan remarks on its own decisions: copies of weights, configurations, unverified rates."""

from __future__ import annotations

from collections.abc import Sequence

from hal.device import DeviceSpec
from hal.device_group import GroupLink
from hal.kernel_uses import planned_uses
from hal.memory_need import stored_weight_bytes
from hal.ops import CATALOGUE
from hal.plan import OpSite, PlannedOp
from hal.roofline import measured_elsewhere, unverified_rates


def decided_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Of the chosen implementations."""
    return [*_copy_notes(ops), *_untuned_notes(ops), *_caveat_notes(ops)]


def rate_notes(sites: Sequence[OpSite], device: DeviceSpec, link: GroupLink | None) -> list[str]:
    """Of the rates that the plan's times rest on."""
    requests = [site.request for site in sites]
    notes = []
    if found := unverified_rates(requests, device, link):
        notes.append(f"times rest on unverified figures: {', '.join(found)}")
    if found := measured_elsewhere(requests, device):
        notes.append(
            "times rest on rates that others measured on such a device, as no peak of it is known, "
            f"and may be undercut: {', '.join(found)}"
        )
    return notes


def _untuned_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Chosen implementations that run with a configuration nobody measured on the device."""
    names: dict[str, set[str]] = {}
    for op in ops:
        if op.choice.untuned and not _is_measured(op):
            names.setdefault(op.choice.untuned, set()).add(op.choice.name)
    return [
        f"configuration not measured on this device: {', '.join(sorted(chosen))} ({text})"
        for text, chosen in names.items()
    ]


def _caveat_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Chosen implementations whose stored machine code is not that of the installed compiler."""
    names: dict[str, set[str]] = {}
    for op in ops:
        for use in planned_uses(op):
            if use.caveat:
                names.setdefault(use.caveat, set()).add(op.choice.name)
    return [
        f"machine code of {', '.join(sorted(chosen))} was {caveat}: it may run slower than planned"
        for caveat, chosen in names.items()
    ]


def _is_measured(op: PlannedOp) -> bool:
    """Whether every kernel of it that has something to choose was measured on the device."""
    bases = {use.basis for use in planned_uses(op)} - {"fixed"}
    return bases == {"measured"}


def _copy_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Where ranges of one site pack the weight differently, the memory holds it more than once."""
    layouts: dict[OpSite, set[str]] = {}
    for op in ops:
        if CATALOGUE[op.site.request.op].is_weighted:
            layouts.setdefault(op.site, set()).add(op.choice.weight_layout or op.choice.name)
    sites: dict[tuple[str, ...], list[str]] = {}
    extra: dict[tuple[str, ...], int] = {}
    for site, held in layouts.items():
        if len(held) > 1:
            key = tuple(sorted(held))
            sites.setdefault(key, []).append(site.site)
            extra[key] = extra.get(key, 0) + stored_weight_bytes(site) * (len(held) - 1)
    return [
        f"weights are held {len(held)} times ({', '.join(held)}), {extra[held] / 2**20:,.0f} MiB "
        f"more: {', '.join(names)}"
        for held, names in sites.items()
    ]
