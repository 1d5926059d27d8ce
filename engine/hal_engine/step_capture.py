"""Which decode steps are captured and replayed as one call, and what a plan says about the others.

A step of so many sequences is captured where every implementation that the plan has for it is safe
to capture. Steps with prompts in them are not: their sizes hardly ever come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hal.captured_steps import CaptureScope
from hal.device import EAGER, GRAPH_CAPTURE, DevicePolicy, DeviceSpec
from hal.ops.request import TokenRange
from hal.plan import OpSite, Plan, PlannedOp
from hal_engine.options import EngineOptions
from hal_engine.runnable import is_runnable_on

# The sampler is called by the engine, behind the step.
_OUTSIDE = "sampler."


def obstacles(ops: Iterable[PlannedOp], num_sequences: int, rank: int = 0) -> list[str]:
    """Implementations, with a call site of each, that a decode step cannot be captured with."""
    found: dict[str, str] = {}
    for op in _decoding(ops, rank):
        if op.tokens.low <= num_sequences <= op.tokens.high and not op.choice.is_graph_safe:
            found.setdefault(op.choice.name, op.site.site)
    return [f"{name} ({site})" for name, site in found.items()]


def capture_scope(
    device: DeviceSpec, policy: DevicePolicy, options: EngineOptions
) -> CaptureScope | None:
    """The steps that selection is to keep safe to capture where that pays, if any are captured."""
    if not policy.capture_saves_us or not _captures(device):
        return None
    if options.capture_steps == "off" or EAGER in policy.forced_features:
        return None
    return CaptureScope(
        most_sequences=options.max_num_seqs,
        saved_us=policy.capture_saves_us,
        covers=lambda site: _is_in_step(site, rank=0),
    )


def captured_sizes(
    plan: Plan, device: DeviceSpec, options: EngineOptions, rank: int = 0
) -> list[TokenRange]:
    """Numbers of sequences whose decode steps are captured. A border of any call's token ranges is
    a border here: within a range, the same implementations are captured."""
    if not _captures(device) or _why_none(plan, options):
        return []
    return [
        sizes
        for sizes in _ranges(plan.ops, options.max_num_seqs, rank)
        if not obstacles(plan.ops, sizes.high, rank)
    ]


def capture_notes(plan: Plan, device: DeviceSpec, options: EngineOptions) -> list[str]:
    """What a plan says of it; nothing of a device that captures no steps of this engine."""
    if not _captures(device):
        return []
    if why := _why_none(plan, options):
        return [f"decode steps run call by call: {why}"]
    whole, notes = captured_sizes(plan, device, options), []
    if whole:
        notes.append(f"decode steps of {_said(whole)} sequences are captured and run as one call")
    apart: dict[str, list[TokenRange]] = {}
    for sizes in _ranges(plan.ops, options.max_num_seqs, 0):
        if found := obstacles(plan.ops, sizes.high):
            apart.setdefault(", ".join(found), []).append(sizes)
    return notes + [
        f"decode steps of {_said(sizes)} sequences run call by call: not safe to capture: {why}"
        for why, sizes in apart.items()
    ]


def _why_none(plan: Plan, options: EngineOptions) -> str:
    if options.capture_steps == "off":
        return "capture_steps is off"
    forced = plan.policy.get("forced_features", {})
    return f"the device's policy forces {EAGER} on: {forced[EAGER]}" if EAGER in forced else ""


def _captures(device: DeviceSpec) -> bool:
    return GRAPH_CAPTURE in device.features and is_runnable_on(device)


def _is_in_step(site: OpSite, rank: int) -> bool:
    return (
        rank in site.ranks
        and site.request.phase != "prefill"
        and not site.site.startswith(_OUTSIDE)
    )


def _decoding(ops: Iterable[PlannedOp], rank: int) -> list[PlannedOp]:
    return [op for op in ops if _is_in_step(op.site, rank)]


def _ranges(ops: Iterable[PlannedOp], most: int, rank: int) -> list[TokenRange]:
    """1 to `most`, cut where any call that decodes has a border."""
    highs = {min(op.tokens.high, most) for op in _decoding(ops, rank)} | {most}
    lows = {op.tokens.low - 1 for op in _decoding(ops, rank) if 1 < op.tokens.low <= most}
    borders = sorted(highs | lows)
    return [
        TokenRange(below + 1, high) for below, high in zip([0, *borders], borders, strict=False)
    ]


def _said(sizes: Sequence[TokenRange]) -> str:
    """Neighbours joined: "1 to 16 and 20"."""
    joined: list[tuple[int, int]] = []
    for part in sizes:
        if joined and joined[-1][1] + 1 == part.low:
            joined[-1] = (joined[-1][0], part.high)
        else:
            joined.append((part.low, part.high))
    return " and ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in joined)
