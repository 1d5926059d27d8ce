"""What a candidate answers about a request, checked: it comes from a plug-in.

A failure is an error that names the candidate and its distribution, never a reason to pass it over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hal.candidates import KernelCandidate, KernelUse, SemanticNote, Work
from hal.errors import PlanError, SelectionError, SettingsError
from hal.ops.request import OpRequest
from hal.reasons import Reason, ReasonKind

_Answer = TypeVar("_Answer")

# Beyond every call that could be made; sums of such numbers stay finite.
_MOST_WORK = 1e30
_MOST_US = 1e15

# The other kinds are selection's own: a candidate cannot know who else is there or what is allowed.
_OF_CANDIDATES = (
    ReasonKind.SCOPE,
    ReasonKind.HARDWARE,
    ReasonKind.ARGUMENT,
    ReasonKind.SOFTWARE,
    ReasonKind.MISSING,
    ReasonKind.UNVERIFIED,
)


def _ask(
    candidate: KernelCandidate, question: str, request: OpRequest, answer: Callable[[], _Answer]
) -> _Answer:
    try:
        return answer()
    except (SettingsError, PlanError):  # a file that it reads is wrong, and says so itself
        raise
    except (Exception, SystemExit) as error:
        raise SelectionError(
            f"{candidate.name} of {candidate.distribution}",
            f"an answer of {question} for {request.label}, {request.arguments()}",
            f"{type(error).__name__}: {error}",
            f"report it to {candidate.distribution}, or remove it meanwhile",
        ) from error


def reasons_of(candidate: KernelCandidate, request: OpRequest) -> list[Reason]:
    """Why it cannot serve; empty if it can. Raises SelectionError if it cannot say."""

    def answer() -> list[Reason]:
        reasons = list(candidate.not_supported_reasons(request))
        for reason in reasons:
            if not isinstance(reason, Reason):
                raise TypeError(f"required Reason, found {type(reason).__name__}")
            for field in (reason.what, reason.required, reason.found):
                if not isinstance(field, str):
                    raise TypeError(f"required a Reason of texts, found {type(field).__name__}")
            if reason.kind not in _OF_CANDIDATES:
                raise ValueError(
                    f"required a reason of kind {', '.join(_OF_CANDIDATES)}, found {reason.kind}"
                )
        return reasons

    return _ask(candidate, "not_supported_reasons", request, answer)


def estimate_of(candidate: KernelCandidate, request: OpRequest) -> float | None:
    """Microseconds at the upper end of the range, or None. Raises SelectionError for nonsense."""

    def answer() -> float | None:
        value = candidate.estimate_us(request, request.tokens.high)
        if value is None:
            return None
        if not 0 <= value <= _MOST_US:
            raise ValueError(f"required None or a time of 0 to {_MOST_US:g} µs, found {value}")
        return float(value)

    return _ask(candidate, "estimate_us", request, answer)


def estimate_source_of(candidate: KernelCandidate, request: OpRequest) -> str:
    """Where the estimate of `estimate_of` is from; "" if it says nothing. Raises SelectionError for
    nonsense."""

    def answer() -> str:
        source = candidate.estimate_source(request, request.tokens.high)
        if not isinstance(source, str):
            raise TypeError(f"required a text, found {type(source).__name__}")
        return source

    return _ask(candidate, "estimate_source", request, answer)


def work_of(candidate: KernelCandidate, request: OpRequest, tokens: int) -> Work | None:
    """What it does for one call where that is not what the op needs, else None.

    Raises SelectionError for nonsense.
    """

    def answer() -> Work | None:
        work = candidate.work(request, tokens)
        if work is None:
            return None
        if not isinstance(work, Work):
            raise TypeError(f"required Work or None, found {type(work).__name__}")
        if not isinstance(work.unit, str):
            raise TypeError(f"required a unit as text, found {type(work.unit).__name__}")
        for what, value in (("flops", work.flops), ("bytes", work.bytes)):
            if not 0 <= value <= _MOST_WORK:
                raise ValueError(f"required {what} of 0 to {_MOST_WORK:g}, found {value}")
        return work

    return _ask(candidate, "work", request, answer)


_USE_TEXTS = (
    "kernel", "config", "code", "caveat", "configuration", "basis", "shape", "note",
)  # fmt: skip


def kernel_uses_of(candidate: KernelCandidate, request: OpRequest) -> tuple[KernelUse, ...]:
    """The compiled kernels that it would launch. Raises SelectionError for nonsense."""

    def answer() -> tuple[KernelUse, ...]:
        uses = tuple(candidate.kernel_uses(request))
        for use in uses:
            if not isinstance(use, KernelUse):
                raise TypeError(f"required KernelUse, found {type(use).__name__}")
            for field in _USE_TEXTS:
                if not isinstance(getattr(use, field), str):
                    raise TypeError(f"required {field} of a KernelUse as text")
            if use.loss is not None and not 0 <= use.loss <= 1:
                raise ValueError(f"required a loss of 0 to 1, found {use.loss}")
        return uses

    return _ask(candidate, "kernel_uses", request, answer)


class SemanticNotes:
    """A candidate's semantic notes on a request, asked for at most once, and only if needed."""

    def __init__(self, candidate: KernelCandidate, request: OpRequest) -> None:
        self._candidate, self._request = candidate, request
        self._notes: tuple[SemanticNote, ...] | None = None

    def get(self) -> tuple[SemanticNote, ...]:
        """Raises SelectionError if the candidate cannot say."""
        if self._notes is None:
            candidate, request = self._candidate, self._request

            def answer() -> tuple[SemanticNote, ...]:
                notes = tuple(candidate.semantic_notes(request))
                for note in notes:
                    if not isinstance(note, SemanticNote):
                        raise TypeError(f"required SemanticNote, found {type(note).__name__}")
                return notes

            self._notes = _ask(candidate, "semantic_notes", request, answer)
        return self._notes
