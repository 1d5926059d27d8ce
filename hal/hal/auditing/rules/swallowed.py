"""Rules for errors and refusals that somebody caught, to go on with something else."""

from __future__ import annotations

from collections.abc import Iterator

from hal.auditing.gates import GateClass, Severity
from hal.auditing.rules.packages import is_about_arch
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex, bare_name

MAX_TEXT = 160

# Errors by which Python programs ask questions, and calls that only read data.
_QUESTIONS = frozenset({"StopIteration", "KeyError", "IndexError", "AttributeError"})
_CONVERSIONS = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "stack", "load", "item"})


def _errors(index: TraceIndex) -> Iterator[Hit]:
    for error in index.trace.swallowed:
        if is_about_arch(error.text):
            continue  # `wrong-arch-package` names it
        if error.kind.startswith("_"):
            continue  # a library's own way out of a call: `_StopRecomputationError` of checkpoints
        if error.kind in _QUESTIONS or bare_name(error.raised_by) in _CONVERSIONS:
            continue
        line = " ".join(error.text.split())[:MAX_TEXT]
        who = error.raised_by or "a call"
        yield Hit(
            title=f"{who} failed with {error.kind}, and the program went on without it",
            location=error.location,
            evidence=(evidence(who, "an error that is seen", f"{error.kind}: {line}, caught"),),
            calls=error.calls,
        )


def _refusals(index: TraceIndex) -> Iterator[Hit]:
    for refusal in index.trace.refusals:
        if refusal.is_swallowed:
            yield Hit(
                title=f"{refusal.who} refused, and the program went on: found {refusal.found}",
                location=refusal.location,
                evidence=(evidence(refusal.who, refusal.required, refusal.found),),
                calls=1,
                remedy=refusal.remedy,
                severity=Severity.ERROR,
            )


RULES = (
    Rule(
        id="swallowed-error",
        gate=GateClass.LOST_FAST_PATH,
        summary="an error of torch, or the failed import of a kernel library, that was caught, "
        "to take another way",
        remedy="install or fix what failed, or ask for the other way explicitly",
        check=_errors,
    ),
    Rule(
        id="swallowed-refusal",
        gate=GateClass.LOST_FAST_PATH,
        summary="a refusal of halstack that the program caught, to go on with another component",
        remedy="do what the refusal says, or waive it",
        check=_refusals,
    ),
)
