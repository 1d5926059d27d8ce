"""Token ranges of a plan: where along the number of tokens another implementation wins.

Selection is asked once per bucket (powers of two up to the most tokens of a step); neighbouring
buckets with the same choice are one range. Where an op packs a weight, each further implementation
holds the weight once more, so a split must be worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hal.ops.request import OpRequest, TokenRange
from hal.reasons import RANKING_KINDS, Reason, ReasonKind
from hal.selection import Decision, Rejection

# A weight is packed a second time only for a range that gains at least this share of its time.
MIN_GAIN_OF_SECOND_PACKING = 0.10
# Without a weight a switch costs nothing, but differences below noise are not worth a range.
MIN_GAIN_OF_SWITCH = 0.03
_NO_LOSS = RANKING_KINDS | {ReasonKind.SCOPE}
_BELOW = ", at up to "  # marks a reason that holds at the lower sizes of a range only


def token_buckets(tokens: TokenRange) -> list[TokenRange]:
    """Buckets (low..high) whose upper ends are powers of two, covering the range exactly."""
    buckets = []
    low = tokens.low
    high = 1
    while high < low:
        high *= 2
    while low <= tokens.high:
        buckets.append(TokenRange(low, min(high, tokens.high)))
        low, high = high + 1, high * 2
    return buckets


def decide_ranges(
    request: OpRequest,
    choose: Callable[[OpRequest, str | None], Decision],
    *,
    is_weighted: bool,
) -> list[tuple[TokenRange, Decision]]:
    """Decisions per token range, in order, covering `request.tokens`.

    choose(request, held): selection for one bucket; with a name, the decision that holds on to
    that candidate (only asked for candidates that can serve the bucket at the winning tier).
    """
    buckets = token_buckets(request.tokens)
    decisions = [choose(request.with_tokens(bucket), None) for bucket in buckets]
    names = _settle(buckets, decisions, is_weighted)
    settled = [
        d if d.choice.name == name else choose(request.with_tokens(b), name)
        for b, d, name in zip(buckets, decisions, names, strict=True)
    ]
    return _merge(buckets, settled)


def _estimate_in(decision: Decision, name: str) -> float | None:
    """The estimate of `name` in a bucket where it could serve at the tier of the choice, and keeps
    no step from being captured."""
    if decision.choice.name == name:
        return decision.estimate_us
    for loser in decision.rejected:
        if loser.name == name and loser.tier == decision.choice.tier:
            kinds = {reason.kind for reason in loser.reasons}
            return None if ReasonKind.CAPTURE in kinds else loser.estimate_us
    return None


def _settle(
    buckets: Sequence[TokenRange], decisions: Sequence[Decision], is_weighted: bool
) -> list[str]:
    """The name per bucket after switches that gain too little are taken back.

    Greedy from the implementation that wins most buckets: each bucket keeps its own winner only if
    that gains enough over an implementation that is already held.
    """
    winners = [d.choice.name for d in decisions]
    order = sorted(set(winners), key=lambda n: (-winners.count(n), winners.index(n)))
    held = order[:1]
    minimum = MIN_GAIN_OF_SECOND_PACKING if is_weighted else MIN_GAIN_OF_SWITCH
    for name in order[1:]:
        if any(
            _gain(decision, held) >= minimum
            for decision, winner in zip(decisions, winners, strict=True)
            if winner == name
        ):
            held.append(name)
    return [_first_held(decision, held) for decision in decisions]


def _first_held(decision: Decision, held: Sequence[str]) -> str:
    """The best-ranked of the held that can serve; rejections are listed by rank."""
    ranked = (decision.choice.name, *(loser.name for loser in decision.rejected))
    able = (n for n in ranked if n in held and _estimate_in(decision, n) is not None)
    return next(able, decision.choice.name)


def _gain(decision: Decision, held: Sequence[str]) -> float:
    """Share of time that the winner saves over the best held one; 1 if none held can serve."""
    others = [e for e in (_estimate_in(decision, n) for n in held) if e is not None]
    if not others or decision.estimate_us is None:
        return 1.0
    return 1.0 - decision.estimate_us / min(others) if min(others) > 0 else 0.0


def _merge(
    buckets: Sequence[TokenRange], decisions: Sequence[Decision]
) -> list[tuple[TokenRange, Decision]]:
    merged: list[tuple[TokenRange, Decision]] = []
    for bucket, decision in zip(buckets, decisions, strict=True):
        if merged and _is_same(merged[-1][1], decision):
            merged.append(_merge_two(*merged.pop(), bucket, decision))
        else:
            merged.append((bucket, decision))
    return merged


def _merge_two(
    low: TokenRange, at_low: Decision, high: TokenRange, at_high: Decision
) -> tuple[TokenRange, Decision]:
    """One decision for both ranges: the times of the upper one, and what only the lower one had
    against a loser (it was faster there, but not by enough)."""
    earlier = {loser.name: loser.reasons for loser in at_low.rejected}
    rejected = tuple(
        replace(loser, reasons=(*loser.reasons, *_only_below(earlier[loser.name], loser, low)))
        for loser in at_high.rejected
    )
    tokens = TokenRange(low.low, high.high)
    request = at_high.request.with_tokens(tokens)
    return tokens, replace(at_high, request=request, rejected=rejected)


def _only_below(earlier: Sequence[Reason], loser: Rejection, tokens: TokenRange) -> list[Reason]:
    here = {_topic(reason) for reason in loser.reasons}
    return [
        reason
        if _BELOW in reason.what
        else replace(reason, what=f"{reason.what}{_BELOW}{tokens.high} tokens")
        for reason in earlier
        if _topic(reason) not in here
    ]


def _is_same(a: Decision, b: Decision) -> bool:
    """Same choice and meaning, and the same losers for the same causes; times may differ, and so
    may what was found, which is the number of tokens. That a loser is not meant for a size, or is
    slower at it, divides nothing, unless another one is lost then."""
    return (
        a.choice.name == b.choice.name
        and a.semantic_notes == b.semantic_notes
        and _lost(a) == _lost(b)
        and _causes(a) == _causes(b)
    )


def _lost(decision: Decision) -> str:
    return "" if decision.lost is None else decision.lost.better


def _causes(decision: Decision) -> set[tuple[str, str, str, ReasonKind]]:
    return {
        (loser.name, reason.what, reason.required, reason.kind)
        for loser in decision.rejected
        for reason in loser.reasons
        if reason.kind not in _NO_LOSS
    }


def _topic(reason: Reason) -> str:
    return reason.what.split(_BELOW, maxsplit=1)[0]
