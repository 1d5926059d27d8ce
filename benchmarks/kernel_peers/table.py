"""The findings side by side: what is worse where, as JSON and as a table to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hal_kernels.aot.evidence import Evidence, short_instruction
from kernel_peers.compiling import Finding
from kernel_peers.judging import dominates, judge, resident_warps
from kernel_peers.launches import Launch, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One problem on one target. worse, traded: metric -> the peer that is better and by what, and
    of a trade its price, as `judging` says."""

    problem: Problem
    target: str
    own: Finding
    peers: tuple[Finding, ...]
    worse: Mapping[str, str]
    traded: Mapping[str, str]
    beaten_by: tuple[str, ...]

    @property
    def better(self) -> tuple[str, ...]:
        """Peers that are worse than ours in something and better in nothing."""
        return tuple(p.contender for p in self.peers if dominates(self.own, p))


def cells(problems: Sequence[Problem], findings: Iterable[Finding]) -> Iterator[Cell]:
    """In the order of the problems, target by target."""
    grouped: dict[tuple[str, str], list[Finding]] = {}
    for found in findings:
        grouped.setdefault((found.problem, found.evidence.target), []).append(found)
    for problem in problems:
        for (name, target), (own, *peers) in grouped.items():
            if name == problem.name:
                verdict = judge(own, peers)
                beaten = tuple(p.contender for p in peers if dominates(p, own))
                worse, traded = verdict.worse, verdict.traded
                yield Cell(problem, target, own, tuple(peers), worse, traded, beaten)


def _problems(found: Sequence[Cell]) -> list[Problem]:
    return list({cell.problem.name: cell.problem for cell in found}.values())


def document(
    found: Sequence[Cell],
    versions: Mapping[str, str],
    today: str,
    kept: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything as plain data. kept: problem -> date, of those that an earlier result has."""
    return {
        "date": today,
        "kept": dict(sorted(kept.items())),
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
                "traded": dict(cell.traded),
                "beaten_by": list(cell.beaten_by),
                "better_than": list(cell.better),
            }
            for cell in found
        ],
    }


def _plain(found: Finding) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"resident_warps": resident_warps(found.evidence)}


def markdown(
    found: Sequence[Cell],
    versions: Mapping[str, str],
    today: str,
    kept: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The table to read: a section per problem, a row per target and contender. kept: as in
    `document`."""
    lines = [f"# Our Triton kernels beside public ones, {today}", "", _METHOD, ""]
    lines += ["Versions: " + ", ".join(f"{n} {v}" for n, v in versions.items()) + ".", ""]
    if kept:
        names = ", ".join(f"{name} ({date})" for name, date in sorted(kept.items()))
        lines += [f"Compiled for an earlier result, ours as it was then: {names}.", ""]
    lines += _summary(found)
    for problem in _problems(found):
        lines += _section(problem, [c for c in found if c.problem is problem])
    return "\n".join(lines) + "\n"


def _section(problem: Problem, found: Sequence[Cell]) -> Iterator[str]:
    yield from ("", f"## {problem.name}", "", f"{problem.what}. Bytes: {problem.formula}.", "")
    for peer in problem.peers:
        note = f"; {peer.note}" if peer.note else ""
        yield f"- {peer.peer}: `{peer.function}` as in {peer.source}{note}{_absences(peer)}."
    yield from ("", _HEAD, _RULE)
    for cell in found:
        yield from _rows(cell)
    for arch, why in problem.skips.items():
        yield from ("", f"Not on {arch}: {why}.")


def _absences(peer: Launch) -> str:
    """Where a peer's launcher takes no such call, and why."""
    by_reason: dict[str, list[str]] = {}
    for arch, why in peer.skips.items():
        by_reason.setdefault(why, []).append(arch)
    return "".join(f"; not on {', '.join(arches)}: {why}" for why, arches in by_reason.items())


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

`worse` names what a peer has better; `beaten` that a peer is better in something and worse in
nothing; `ahead of` the peers that ours beats so. `traded` is what a peer has better and pays for:
its code is of a lower tier (ours could take the same tile and spill as well), no block of it fits,
or it has more resident warps with more bytes, or fewer bytes with fewer warps, and each resident
warp has as many bytes to move as with ours or more. Bytes differ from 2%, resident warps from half
as many again. Registers and shared memory count by the warps that they let in."""


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
    if cell.traded:
        parts.append("traded: " + "; ".join(f"{m} ({who})" for m, who in cell.traded.items()))
    if cell.better:
        parts.append(f"ahead of {', '.join(cell.better)}")
    return ". ".join(part.rstrip(".") for part in parts if part)


def _summary(found: Sequence[Cell]) -> list[str]:
    behind = [c for c in found if c.worse or c.beaten_by]
    beaten = [c for c in found if c.beaten_by]
    traded = [c for c in found if c.traded and c not in behind]
    ahead = [c for c in found if c.better]
    clear = len(found) - len(behind) - len(traded)
    return [
        f"{len(found)} cells (problem and target): in {clear} no peer has anything better, in "
        f"{len(traded)} what one has better is traded, in {len(behind)} ours is worse in "
        f"something, in {len(beaten)} of these the peer is worse in nothing. In {len(ahead)} ours "
        "is ahead of at least one peer.",
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
    word = "ahead" if cell.better else "level"
    return f"{word}; traded: {', '.join(cell.traded)}" if cell.traded else word
