"""The findings side by side: what is worse where, as JSON and as a table to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hal_kernels.aot.evidence import Evidence, short_instruction
from hal_kernels.aot.occupancy import occupancy_of_evidence
from kernel_peers.compiling import Finding
from kernel_peers.explanations import explanation
from kernel_peers.launches import Problem

# Worse by less than this factor is the same: estimates of bytes leave out caches, and more warps
# help no longer once those that there are hide the latency of memory.
MARGINS = {"bytes": 1.02, "resident warps": 1.5}
_TIERS = ("error", "scalar", "emulated", "spilled", "native")


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One problem on one target. worse: metric -> the peer that is better and by what."""

    problem: Problem
    target: str
    own: Finding
    peers: tuple[Finding, ...]
    worse: Mapping[str, str]
    beaten_by: tuple[str, ...]

    @property
    def better(self) -> tuple[str, ...]:
        """Peers that are worse than ours in something and better in nothing."""
        return tuple(p.contender for p in self.peers if _dominates(self.own, p))


def cells(problems: Sequence[Problem], findings: Iterable[Finding]) -> Iterator[Cell]:
    """In the order of the problems, target by target."""
    grouped: dict[tuple[str, str], list[Finding]] = {}
    for found in findings:
        grouped.setdefault((found.problem, found.evidence.target), []).append(found)
    for problem in problems:
        for (name, target), (own, *peers) in grouped.items():
            if name == problem.name:
                worse = _worse(own, peers)
                beaten = tuple(p.contender for p in peers if _dominates(p, own))
                yield Cell(problem, target, own, tuple(peers), worse, beaten)


def resident_warps(evidence: Evidence) -> int:
    """Warps that a multiprocessor holds; 0 where no block fits, or nothing compiles."""
    found = occupancy_of_evidence(evidence)
    return 0 if found is None else found.warps


def _problems(found: Sequence[Cell]) -> list[Problem]:
    return list({cell.problem.name: cell.problem for cell in found}.values())


def _measures(found: Finding) -> dict[str, float]:
    """Metric -> value, all the better the smaller. What does not compile has none."""
    evidence = found.evidence
    return {
        "tier": -_TIERS.index(evidence.tier),
        "spills": evidence.spills,
        "load width": -min(16, evidence.widest_load_bytes),
        "bytes": found.moved_bytes,
        "resident warps": -resident_warps(evidence),
    }


def _differs(metric: str, small: float, large: float) -> bool:
    """Whether the first is better; values that are the better the larger come as negative ones."""
    margin = MARGINS.get(metric, 1.0)
    return small * margin < large if small >= 0 else small < large * margin


def _worse(own: Finding, peers: Sequence[Finding]) -> dict[str, str]:
    if own.evidence.error:
        able = [p.contender for p in peers if not p.evidence.error]
        return {"tier": f"{', '.join(able)} compiles"} if able else {}
    ours, worse = _measures(own), {}
    compiled = [(p, _measures(p)) for p in peers if not p.evidence.error]
    for metric, value in ours.items() if compiled else ():
        best, measures = min(compiled, key=lambda found: found[1][metric])
        if _differs(metric, measures[metric], value):
            shown = f"{best.contender} {_shown(metric, best)}, ours {_shown(metric, own)}"
            worse[metric] = shown
    return worse


def _shown(metric: str, found: Finding) -> str:
    if metric == "tier":
        return found.evidence.tier
    if metric == "bytes":
        return f"{found.moved_bytes / 2**20:,.1f} MiB"
    return f"{abs(_measures(found)[metric]):.0f}"


def _dominates(one: Finding, other: Finding) -> bool:
    """Whether one is nowhere worse, and better in something."""
    if one.evidence.error or other.evidence.error:
        return not one.evidence.error and bool(other.evidence.error)
    first, second = _measures(one), _measures(other)
    is_worse = any(_differs(m, second[m], first[m]) for m in first)
    return not is_worse and any(_differs(m, first[m], second[m]) for m in first)


def document(found: Sequence[Cell], versions: Mapping[str, str], today: str) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "date": today,
        "versions": dict(versions),
        "problems": [
            {"name": c.name, "what": c.what, "bytes": c.formula} for c in _problems(found)
        ],
        "cells": [
            {
                "problem": cell.problem.name,
                "target": cell.target,
                "findings": [_plain(f) for f in (cell.own, *cell.peers)],
                "worse": dict(cell.worse),
                "beaten_by": list(cell.beaten_by),
                "better_than": list(cell.better),
                "explanation": explanation(cell.problem.name, cell.target, cell.worse),
            }
            for cell in found
        ],
    }


def _plain(found: Finding) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"resident_warps": resident_warps(found.evidence)}


def markdown(found: Sequence[Cell], versions: Mapping[str, str], today: str) -> str:
    """The table to read: a section per problem, a row per target and contender."""
    lines = [f"# Our Triton kernels beside public ones, {today}", "", _METHOD, ""]
    lines += ["Versions: " + ", ".join(f"{n} {v}" for n, v in versions.items()) + ".", ""]
    lines += _summary(found)
    for problem in _problems(found):
        lines += _section(problem, [c for c in found if c.problem is problem])
    return "\n".join(lines) + "\n"


def _section(problem: Problem, found: Sequence[Cell]) -> Iterator[str]:
    yield from ("", f"## {problem.name}", "", f"{problem.what}. Bytes: {problem.formula}.", "")
    for peer in problem.peers:
        note = f"; {peer.note}" if peer.note else ""
        yield f"- {peer.peer}: `{peer.function}` as in {peer.source}{note}."
    yield from ("", _HEAD, _RULE)
    for cell in found:
        yield from _rows(cell)
    for arch, why in problem.skips.items():
        yield from ("", f"Not on {arch}: {why}.")


_COLUMNS = (
    "target", "contender", "tier", "instruction", "registers", "spills", "shared KiB", "warps",
    "resident", "load B", "MiB moved", "",
)  # fmt: skip
_HEAD = "| " + " | ".join(_COLUMNS) + " |"
_RULE = "|---" * len(_COLUMNS) + "|"
_METHOD = """\
Compiled ahead of time by one Triton, without a device, and read by one reader: `python
benchmarks/peer_kernels.py`. A peer's kernel is cut out of its own wheel and compiled with the
configuration that its launcher takes by default on that architecture; where it measures and chooses
among several, with the one that spills least, then needs the fewest registers. Registers and spills
are of a thread, in words of 32 bits; `load` is the widest load of a thread from global memory;
`resident` is how many warps a multiprocessor holds by registers and shared memory; `moved` is an
estimate by the formula beside the problem of what the programs ask for, caches left out.

`worse` names what a peer has better, whatever it pays for it elsewhere; `beaten` that a peer is
better in something and worse in nothing; `ahead of` the peers that ours beats so. Bytes differ from
2%, resident warps from half as many again. Registers and shared memory count by the warps that they
let in."""


def _rows(cell: Cell) -> Iterator[str]:
    for found in (cell.own, *cell.peers):
        evidence = found.evidence
        verdict = _verdict(cell) if found is cell.own else ""
        if evidence.error:
            empty = " |" * (len(_COLUMNS) - 5)
            told = f"error | {_short(evidence)} |{empty} {verdict}"
            yield f"| {cell.target} | {found.contender} | {told} |"
            continue
        product = f"{evidence.instruction_count}x {short_instruction(evidence.instruction)}"
        yield (
            f"| {cell.target} | {found.contender} | {evidence.tier} "
            f"| {product if evidence.instruction else ''} | {evidence.registers} "
            f"| {evidence.spills} | {evidence.shared_bytes / 1024:.0f} | {evidence.num_warps} "
            f"| {resident_warps(evidence)} | {evidence.widest_load_bytes} "
            f"| {found.moved_bytes / 2**20:,.1f} | {verdict} |"
        )


def _short(evidence: Evidence) -> str:
    return evidence.error.replace("|", "/")[:90]


def _verdict(cell: Cell) -> str:
    parts = []
    if cell.beaten_by:
        parts.append(f"beaten by {', '.join(cell.beaten_by)}")
    if cell.worse:
        parts.append("worse: " + "; ".join(f"{m} ({who})" for m, who in cell.worse.items()))
        parts.append(explanation(cell.problem.name, cell.target, cell.worse))
    if cell.better:
        parts.append(f"ahead of {', '.join(cell.better)}")
    return ". ".join(part.rstrip(".") for part in parts if part)


def _summary(found: Sequence[Cell]) -> list[str]:
    behind = [c for c in found if c.worse or c.beaten_by]
    beaten = [c for c in found if c.beaten_by]
    ahead = [c for c in found if c.better]
    return [
        f"{len(found)} cells (problem and target): in {len(found) - len(behind)} no peer has "
        f"anything better, in {len(ahead)} ours is ahead of at least one peer, in {len(behind)} a "
        f"peer has something better, in {len(beaten)} of these it is worse in nothing.",
        "",
        "| problem | " + " | ".join(dict.fromkeys(c.target for c in found)) + " |",
        "|---" * (1 + len(dict.fromkeys(c.target for c in found))) + "|",
        *_matrix(found),
    ]


def _matrix(found: Sequence[Cell]) -> Iterator[str]:
    targets = list(dict.fromkeys(c.target for c in found))
    for problem in _problems(found):
        own = {c.target: c for c in found if c.problem is problem}
        words = [_word(own[t]) if t in own else "" for t in targets]
        yield f"| {problem.name} | " + " | ".join(words) + " |"


def _word(cell: Cell) -> str:
    if cell.own.evidence.error:
        return "does not compile"
    if cell.beaten_by:
        return "**beaten**: " + ", ".join(cell.beaten_by)
    if cell.worse:
        return "worse: " + ", ".join(cell.worse)
    return "ahead" if cell.better else "level"
