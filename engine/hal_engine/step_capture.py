"""Which decode steps are captured and replayed as one call, and what a plan says about the others.

A step of so many sequences is captured where every implementation that the plan has for it is safe
to capture. Steps with prompts in them are not: their sizes hardly ever come twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hal.device import GRAPH_CAPTURE, DeviceSpec
from hal.ops.request import TokenRange
from hal.plan import PlannedOp
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


def captured_sizes(
    ops: Sequence[PlannedOp], device: DeviceSpec, options: EngineOptions, rank: int = 0
) -> list[TokenRange]:
    """Numbers of sequences whose decode steps are captured. A border of any call's token ranges is
    a border here: within a range, the same implementations are captured."""
    if options.capture_steps == "off" or not _captures(device):
        return []
    return [
        sizes
        for sizes in _ranges(ops, options.max_num_seqs, rank)
        if not obstacles(ops, sizes.high, rank)
    ]


def capture_notes(
    ops: Sequence[PlannedOp], device: DeviceSpec, options: EngineOptions
) -> list[str]:
    """What a plan says of it; nothing of a device that captures no steps of this engine."""
    if not _captures(device):
        return []
    if options.capture_steps == "off":
        return ["decode steps run call by call: capture_steps is off"]
    whole, notes = captured_sizes(ops, device, options), []
    if whole:
        notes.append(f"decode steps of {_said(whole)} sequences are captured and run as one call")
    apart: dict[str, list[TokenRange]] = {}
    for sizes in _ranges(ops, options.max_num_seqs, 0):
        if found := obstacles(ops, sizes.high):
            apart.setdefault(", ".join(found), []).append(sizes)
    return notes + [
        f"decode steps of {_said(sizes)} sequences run call by call: not safe to capture: {why}"
        for why, sizes in apart.items()
    ]


def _captures(device: DeviceSpec) -> bool:
    return GRAPH_CAPTURE in device.features and is_runnable_on(device)


def _decoding(ops: Iterable[PlannedOp], rank: int) -> list[PlannedOp]:
    return [
        op
        for op in ops
        if rank in op.site.ranks
        and op.site.request.phase != "prefill"
        and not op.site.site.startswith(_OUTSIDE)
    ]


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
