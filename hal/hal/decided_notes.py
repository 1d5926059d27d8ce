"""What a plan remarks on its own decisions: copies of weights, configurations, unverified rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.device import DeviceSpec
from hal.device_group import GroupLink
from hal.kernel_uses import planned_uses
from hal.memory_need import stored_weight_bytes
from hal.ops import CATALOGUE
from hal.ops.index_top_k import CANDIDATE_BLOCK_ENTRIES
from hal.plan import OpSite, PlannedOp
from hal.roofline import measured_elsewhere, unverified_rates

_RANKED = "configuration ranked by a model for this device, and not measured on it"
_DEFAULT = "configuration not measured on this device"


def decided_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Of the chosen implementations."""
    return [
        *_copy_notes(ops),
        *_workspace_notes(ops),
        *_whole_context_notes(ops),
        *_untuned_notes(ops),
        *_explanation_notes(ops),
        *_caveat_notes(ops),
    ]


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
    """Chosen implementations that run with a configuration nobody measured on the device: ranked by
    a model, or what they have by default."""
    names: dict[tuple[str, str], set[str]] = {}
    for op in ops:
        if not op.choice.untuned or _is_measured(op):
            continue
        bases = {use.basis for use in planned_uses(op)}
        if "modelled" in bases:
            names.setdefault((_RANKED, ""), set()).add(op.choice.name)
        if not {"modelled", "measured"} & bases or "default" in bases:
            rests_on = f" ({op.choice.untuned})"
            names.setdefault((_DEFAULT, rests_on), set()).add(op.choice.name)
    return [
        f"{text}: {', '.join(sorted(chosen))}{rests_on}"
        for (text, rests_on), chosen in names.items()
    ]


def _explanation_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Chosen implementations whose machine code is not what the hardware is best at, with why."""
    names: dict[str, set[str]] = {}
    for op in ops:
        for use in planned_uses(op):
            if use.explanation:
                names.setdefault(use.explanation, set()).add(f"{op.choice.name} ({use.kernel})")
    return [
        f"machine code of {', '.join(sorted(chosen))} is not native: {why}"
        for why, chosen in names.items()
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


def _workspace_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Chosen implementations that need device memory beside operands and results."""
    most: dict[str, tuple[int, int]] = {}
    for op in ops:
        needed = max((use.workspace_bytes for use in planned_uses(op)), default=0)
        if needed > most.get(op.choice.name, (0, 0))[0]:
            most[op.choice.name] = (needed, op.tokens.high)
    return [
        f"{name} takes up to {needed:,} bytes beside its operands and results, at {tokens:,} tokens"
        for name, (needed, tokens) in most.items()
    ]


def _whole_context_notes(ops: Sequence[PlannedOp]) -> list[str]:
    """Indexers that score every entry and then choose among those of candidate blocks. One call for
    both scores the candidates alone in a decode; a prompt's queries share the keys of a tile."""
    layers: dict[str, dict[int, None]] = {}
    for op in ops:
        request: Any = op.site.request
        is_decode = request.phase == "decode"
        if request.op == "index_top_k" or (request.op == "index_selection" and not is_decode):
            entries = request.candidate_blocks * CANDIDATE_BLOCK_ENTRIES
            if entries and not request.publishes_candidates:
                calls = "decodes" if is_decode else "prompts"
                text = f"in {calls}, though they choose among {entries:,} entries"
                layers.setdefault(text, {}).update(dict.fromkeys(op.site.layers))
    return [
        f"the indexers of layers {', '.join(map(str, found))} score the whole context {text}: in "
        "longer contexts the rest of the scores is lost work"
        for text, found in layers.items()
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
