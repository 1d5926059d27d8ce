"""Why a candidate that can serve a request is not the choice for it, in a plan's words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hal.candidates import KernelCandidate
from hal.reasons import Reason, ReasonKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What a choice was made from. wanted: the explicit choice. estimates: µs by name, and sources
    where they come from; ranked_before: names that the rule puts before the choice."""

    choice: KernelCandidate
    wanted: str | None
    estimates: Mapping[str, float | None]
    sources: Mapping[str, str]
    ranked_before: Collection[str]


def why_behind(contest: Contest, candidate: KernelCandidate, capture: str) -> tuple[Reason, ...]:
    """The reasons against a candidate that can serve; capture: as of `hal.selection.select`."""
    choice, name = contest.choice, candidate.name
    if contest.wanted is not None:
        return (_reason("explicit choice", name, contest.wanted, ReasonKind.EXPLICIT),)
    if candidate.tier != choice.tier:
        return (_reason("tier", choice.tier.label, candidate.tier.label),)
    is_passed_over = capture and choice.is_graph_safe and not candidate.is_graph_safe
    if not is_passed_over:
        return (_by_time(contest, candidate),)
    why = _reason("captured steps", capture, "not safe to capture", ReasonKind.CAPTURE)
    return (why,) if name in contest.ranked_before else (why, _by_time(contest, candidate))


def _by_time(contest: Contest, candidate: KernelCandidate) -> Reason:
    choice = contest.choice
    mine, best = contest.estimates[candidate.name], contest.estimates[choice.name]
    of_mine = contest.sources.get(candidate.name, "")
    of_best = contest.sources.get(choice.name, "")
    if candidate.name in contest.ranked_before:
        held = f"{choice.name}, held for other ranges"
        required = f"enough below {_us(best, of_best)} ({held})"
        return _reason("gain of a switch between token ranges", required, _us(mine, of_mine))
    if mine != best:
        required = f"below {_us(best, of_best)} ({choice.name})"
        return _reason("estimated time", required, _us(mine, of_mine))
    required, found = (f"{c.name} of {c.distribution}" for c in (choice, candidate))
    return _reason(f"order of distribution and name, both {_us(mine)}", required, found)


def _reason(what: str, required: str, found: str, kind: ReasonKind = ReasonKind.RANKED) -> Reason:
    return Reason(what=what, required=required, found=found, kind=kind)


def _us(value: float | None, source: str = "") -> str:
    if value is None:
        return "not measured"
    return f"{value:.6g} µs, {source}" if source else f"{value:.6g} µs"
