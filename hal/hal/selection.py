"""Selection: the only place where an implementation is chosen for a request.

The rule, stated once. Of the candidates that can serve the request, the best is the one with

1. the higher tier;
2. then the lower estimated time at the upper end of the request's token range (a candidate that
   nobody measured comes after every one that was measured);
3. then the lexically smaller (distribution, candidate name).

Where a decode step is to be captured (`hal.captured_steps`), that is the rule among those of the
highest tier that are safe to capture, if there are any.

Nothing else counts, in particular not the order in which plug-ins were loaded. An explicit choice
replaces the rule: it serves or it raises. The decision carries every other candidate with the
reasons why it was not chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hal.answers import SemanticNotes, estimate_of, estimate_source_of, reasons_of
from hal.candidates import KernelCandidate, SemanticNote
from hal.device import EAGER, DevicePolicy
from hal.errors import SelectionError, UnservedRequestError
from hal.ops.request import OpRequest
from hal.reasons import Reason, ReasonKind
from hal.selection_trace import Contest, why_behind
from hal.suggestions import did_you_mean
from hal.tiers import Tier

# Below this an implementation counts as a lost fast path even if nothing better is known: a better
# one is owed.
FLOOR_TIER = Tier.TUNED


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A candidate that was not chosen, and why."""

    name: str
    tier: Tier
    reasons: tuple[Reason, ...]
    estimate_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tier": self.tier.label,
            "estimate_us": self.estimate_us,
            "reasons": [reason.to_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFastPath:
    """A choice that is worse than what the device could have: an error unless it is waived."""

    better: str  # the candidate that should have served, or "" if none exists
    better_tier: Tier
    reasons: tuple[Reason, ...]
    out_of_reach: tuple[Rejection, ...] = ()  # of that tier, but not for this device or policy

    def describe(self, chosen: KernelCandidate) -> str:
        if not self.better:
            others = "; ".join(
                f"{loser.name} ({', '.join(str(reason) for reason in loser.reasons)})"
                for loser in self.out_of_reach
            )
            return (
                f"{chosen.name} is {chosen.tier.label}; at least {self.better_tier.label} is "
                f"required and no candidate of that tier can serve here: {others or 'none offered'}"
            )
        why = "; ".join(str(reason) for reason in self.reasons)
        return (
            f"{chosen.name} is {chosen.tier.label}; "
            f"{self.better} is {self.better_tier.label} ({why})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice for one request and the trace of how it came about."""

    request: OpRequest
    choice: KernelCandidate
    estimate_us: float | None
    rejected: tuple[Rejection, ...]
    estimate_source: str = ""
    semantic_notes: tuple[SemanticNote, ...] = ()
    lost: LostFastPath | None = None
    is_explicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRules:
    """What the user and the device say about choosing.

    explicit: `--use` entries, op label or op name -> candidate name. allowed_semantics: names of
    semantic notes that the user asked for or waived, as globs. policy: of the device.
    """

    explicit: Mapping[str, str]
    allowed_semantics: frozenset[str] = frozenset()
    policy: DevicePolicy = field(default_factory=DevicePolicy)

    def explicit_key(self, request: OpRequest) -> str | None:
        """The entry that decides: the most specific, `attention.decode` before `attention`."""
        return next((key for key in (request.label, request.op) if key in self.explicit), None)

    def explicit_choice(self, request: OpRequest) -> str | None:
        """The candidate that the user named for the request, or None."""
        key = self.explicit_key(request)
        return None if key is None else self.explicit[key]

    def allows(self, note: SemanticNote) -> bool:
        return any(fnmatchcase(note.name, pattern) for pattern in self.allowed_semantics)


def select(
    request: OpRequest,
    candidates: Sequence[KernelCandidate],
    rules: SelectionRules,
    *,
    held: str | None = None,
    capture: str = "",
) -> Decision:
    """Chooses for one request.

    held: a candidate of the winning tier that neighbouring token ranges use already and that is to
    be used here too, since a switch would gain too little (`hal.ranges`). Ignored where it cannot
    serve or is of a lower tier than the best that can. capture: why what is not safe to capture is
    passed over, for a step that is to be captured; "" for any other.
    Raises SelectionError if an explicit choice cannot serve, two candidates have one name, or a
    candidate cannot answer what it is asked; UnservedRequestError if no candidate can serve.
    """
    _check_names(request, candidates)
    notes = {c.name: SemanticNotes(c, request) for c in candidates}
    unmet = {c.name: _unmet(request, c, notes[c.name], rules) for c in candidates}
    estimates = {c.name: estimate_of(c, request) for c in candidates if not unmet[c.name]}
    sources = {
        c.name: estimate_source_of(c, request)
        for c in candidates
        if estimates.get(c.name) is not None
    }
    wanted = rules.explicit_choice(request)
    if wanted is not None:
        choice = _explicit(request, rules, candidates, unmet)
    else:
        able = [c for c in candidates if not unmet[c.name]]
        if not able:
            raise _none_can_serve(request, candidates, unmet)
        choice = _best(able, estimates, held, is_to_capture=bool(capture))
    contest = Contest(
        choice=choice,
        wanted=wanted,
        estimates=estimates,
        sources=sources,
        ranked_before={
            c.name
            for c in candidates
            if _rank(c, estimates.get(c.name)) < _rank(choice, estimates[choice.name])
        },
    )
    rejected = tuple(
        Rejection(
            name=c.name,
            tier=c.tier,
            reasons=tuple(unmet[c.name]) or why_behind(contest, c, capture),
            estimate_us=estimates.get(c.name),
        )
        for c in sorted(candidates, key=lambda c: _rank(c, estimates.get(c.name)))
        if c.name != choice.name
    )
    return Decision(
        request=request,
        choice=choice,
        estimate_us=estimates[choice.name],
        rejected=rejected,
        semantic_notes=notes[choice.name].get(),
        lost=None if wanted is not None else _lost(choice, rejected),
        is_explicit=wanted is not None,
        estimate_source=sources.get(choice.name, ""),
    )


def _best(
    able: Sequence[KernelCandidate],
    estimates: Mapping[str, float | None],
    held: str | None,
    *,
    is_to_capture: bool,
) -> KernelCandidate:
    best = min(able, key=lambda c: _rank(c, estimates[c.name]))
    meant = [c for c in able if c.tier == best.tier]
    if is_to_capture:
        meant = [c for c in meant if c.is_graph_safe] or meant
    best = min(meant, key=lambda c: _rank(c, estimates[c.name]))
    return next((c for c in meant if c.name == held), best)


def _check_names(request: OpRequest, candidates: Sequence[KernelCandidate]) -> None:
    by_name: dict[str, KernelCandidate] = {}
    for candidate in candidates:
        other = by_name.setdefault(candidate.name, candidate)
        if other is not candidate:
            raise SelectionError(
                f"selection of {request.label}",
                "one candidate a name",
                f"{candidate.name} of {other.distribution} and of {candidate.distribution}",
                "remove one of the two distributions",
            )


def _rank(candidate: KernelCandidate, estimate_us: float | None) -> tuple[Any, ...]:
    unmeasured = float("inf")
    return (
        -candidate.tier,
        unmeasured if estimate_us is None else estimate_us,
        candidate.distribution,
        candidate.name,
    )


def _unmet(
    request: OpRequest, candidate: KernelCandidate, notes: SemanticNotes, rules: SelectionRules
) -> list[Reason]:
    reasons = reasons_of(candidate, request)
    for pattern, why in rules.policy.disabled.items():
        if fnmatchcase(candidate.name, pattern):
            reasons.append(
                Reason(
                    what="device policy",
                    required=f"{candidate.name} enabled",
                    found=f"disabled: {why}",
                    kind=ReasonKind.POLICY,
                )
            )
    if request.graph_mode == "graph":
        reasons += _graph_reasons(candidate, rules)
    # Where only something fixable is in the way, the notes decide whether a fix would help.
    if not all(reason.kind.is_attainable for reason in reasons):
        return reasons
    for note in notes.get():
        if not rules.allows(note):
            reasons.append(
                Reason(
                    what=f"semantics ({note.name})",
                    required="the numbers that the request names",
                    found=note.text,
                    kind=ReasonKind.SEMANTIC,
                )
            )
    return reasons


def _graph_reasons(candidate: KernelCandidate, rules: SelectionRules) -> list[Reason]:
    """What keeps a step with the candidate from being captured as a graph."""
    reasons = []
    if not candidate.is_graph_safe:
        reasons.append(
            Reason(what="graph mode", required="safe to capture", found="not safe to capture")
        )
    why = rules.policy.forced_features.get(EAGER)
    if why is not None:
        reasons.append(
            Reason(
                what="device policy",
                required="steps captured as graphs",
                found=f"eager is forced on: {why}",
                kind=ReasonKind.POLICY,
            )
        )
    return reasons


def _explicit(
    request: OpRequest,
    rules: SelectionRules,
    candidates: Sequence[KernelCandidate],
    unmet: Mapping[str, Sequence[Reason]],
) -> KernelCandidate:
    key = rules.explicit_key(request) or request.label
    wanted = rules.explicit[key]
    who = f"explicit choice --use {key}={wanted} for {request.label}"
    by_name = {c.name: c for c in candidates}
    if wanted not in by_name:
        raise SelectionError(
            who,
            f"the name of a candidate for {request.label} on this device",
            wanted,
            did_you_mean(wanted, by_name),
        )
    if unmet[wanted]:
        raise SelectionError(
            who,
            "; ".join(f"{r.what}: {r.required}" for r in unmet[wanted]),
            "; ".join(f"{r.what}: {r.found}" for r in unmet[wanted]),
            "choose another candidate or leave the choice to selection; "
            "an explicit choice is never degraded",
        )
    return by_name[wanted]


def _none_can_serve(
    request: OpRequest,
    candidates: Sequence[KernelCandidate],
    unmet: Mapping[str, Sequence[Reason]],
) -> UnservedRequestError:
    lines = [
        f"{c.name} ({c.tier.label}): " + "; ".join(str(r) for r in unmet[c.name])
        for c in sorted(candidates, key=lambda c: c.name)
    ]
    semantic = any(all(r.kind is ReasonKind.SEMANTIC for r in unmet[c.name]) for c in candidates)
    return UnservedRequestError(
        f"selection of {request.label} for {request.tokens} tokens, {request.arguments()}",
        "one candidate that can serve it",
        "none of " + " | ".join(lines) if lines else "no candidates at all",
        "install or enable a backend that offers one, or change the precision or the arguments"
        + ('; a change of meaning needs a waiver of kind "semantic"' if semantic else ""),
    )


def _lost(choice: KernelCandidate, rejected: Sequence[Rejection]) -> LostFastPath | None:
    """The best candidate that this device could run if something were fixed, or the floor."""
    fixable = [
        loser
        for loser in rejected
        if loser.tier > choice.tier and all(r.kind.is_attainable for r in loser.reasons)
    ]
    if fixable:
        # Of the best tier the one that is nearest to serving: what can be installed or written
        # before what somebody's kernel has no form for. `min` keeps the rank among equals.
        better = min(fixable, key=lambda loser: (-loser.tier, _gaps(loser)))
        return LostFastPath(better=better.name, better_tier=better.tier, reasons=better.reasons)
    if choice.tier < FLOOR_TIER:
        capable = [loser for loser in rejected if loser.tier >= FLOOR_TIER]
        meant = [
            loser
            for loser in capable
            if all(reason.kind is not ReasonKind.SCOPE for reason in loser.reasons)
        ]
        return LostFastPath(
            better="", better_tier=FLOOR_TIER, reasons=(), out_of_reach=tuple(meant or capable)
        )
    return None


def _gaps(loser: Rejection) -> int:
    return sum(reason.kind is ReasonKind.ARGUMENT for reason in loser.reasons)
