"""Which decode steps are planned to be captured, and run as one call.

A captured step has no work between its calls, but one implementation that is not safe to capture
keeps the whole step from it. Selection sees one call at a time and would take a kernel that is a
little faster and makes every other call of the step slower. So for each bucket of step sizes the
calls of a whole step are added up twice: as selection likes them, and with what is safe to capture.
Where the second sum is below the first and what its calls cost apart, selection is told to choose
among what is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hal.ops.request import OpRequest, TokenRange
from hal.plan import OpSite
from hal.ranges import token_buckets
from hal.selection import Decision

# choose(site, request of one bucket, why what is not safe to capture is passed over or "").
Chooser = Callable[[OpSite, OpRequest, str], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureScope:
    """Decode steps that an engine would capture.

    most_sequences: of a step. saved_us: per call of a captured step, what it costs more to call it
    apart (`DevicePolicy.capture_saves_us`). covers: whether a step calls the site.
    """

    most_sequences: int
    saved_us: float
    covers: Callable[[OpSite], bool]


def captured_buckets(
    sites: Sequence[OpSite], scope: CaptureScope, choose: Chooser
) -> Mapping[TokenRange, str]:
    """Buckets of step sizes in which selection is to choose among what is safe to capture, each
    with the reason that it has against the others. Not among them: sizes that cannot be captured,
    and those that would gain nothing by it.
    """
    covered = [site for site in sites if scope.covers(site)]
    found = {}
    for bucket in token_buckets(TokenRange(1, scope.most_sequences)):
        gain = _gain_us(covered, bucket, scope, choose)
        if gain is not None and gain > 0:
            found[bucket] = (
                f"safe to capture: a step of {bucket} sequences as one call {_less(gain)}"
            )
    return found


def reason_within(buckets: Mapping[TokenRange, str], tokens: TokenRange) -> str:
    """The reason of the first bucket that shares a size with `tokens`, or ""."""
    shared = (b for b in buckets if b.low <= tokens.high and tokens.low <= b.high)
    return next((buckets[bucket] for bucket in shared), "")


def _gain_us(
    sites: Sequence[OpSite], bucket: TokenRange, scope: CaptureScope, choose: Chooser
) -> float | None:
    """What a step of the bucket gains if it is made of what is safe; None where it cannot be, or
    where that would cost a tier or an unknown time."""
    calls, change_us = 0, 0.0
    for site in sites:
        request = _in_bucket(site.request, bucket)
        free = choose(site, request, "")
        layers = max(1, len(site.layers))
        calls += layers
        if free.choice.is_graph_safe:
            continue
        safe = choose(site, request, "safe to capture")
        if not safe.choice.is_graph_safe or safe.estimate_us is None or free.estimate_us is None:
            return None
        change_us += layers * (safe.estimate_us - free.estimate_us)
    return calls * scope.saved_us - change_us


def _in_bucket(request: OpRequest, bucket: TokenRange) -> OpRequest:
    """The request for the one of its own buckets that a step of the bucket's most rows is in."""
    rows = max(request.tokens.low, min(bucket.high, request.tokens.high))
    own = next(b for b in token_buckets(request.tokens) if b.low <= rows <= b.high)
    return request.with_tokens(own)


def _less(gain_us: float) -> str:
    time = f"{gain_us / 1000:.2g} ms" if gain_us >= 100 else f"{gain_us:.2g} µs"
    return f"takes {time} less by the estimates"
