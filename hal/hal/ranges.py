"""Token ranges of a plan: where along the number of tokens another implementation wins.

Selection is asked once per bucket (powers of two up to the most tokens of a step); neighbouring
buckets with the same choice are one range. Where an op packs a weight, each further implementation
holds the weight once more, so a split must be worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.ops.request import OpRequest, TokenRange
from hal.reasons import ReasonKind
from hal.selection import Decision

# A weight is packed a second time only for a range that gains at least this share of its time.
MIN_GAIN_OF_SECOND_PACKING = 0.10
# Without a weight a switch costs nothing, but differences below noise are not worth a range.
MIN_GAIN_OF_SWITCH = 0.03


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
    """The estimate of `name` in a bucket where it could serve at the tier of the choice."""
    if decision.choice.name == name:
        return decision.estimate_us
    for loser in decision.rejected:
        if loser.name == name and loser.tier == decision.choice.tier:
            return loser.estimate_us
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
    names = []
    for decision in decisions:
        known = {n: _estimate_in(decision, n) for n in held}
        able = {n: e for n, e in known.items() if e is not None}
        names.append(min(able, key=lambda n: (able[n], n)) if able else decision.choice.name)
    return names


def _gain(decision: Decision, held: Sequence[str]) -> float:
    """Share of time that the winner saves over the best held one; 1 if none held can serve."""
    others = [e for e in (_estimate_in(decision, n) for n in held) if e is not None]
    if not others or decision.estimate_us is None:
        return 1.0
    return 1.0 - decision.estimate_us / min(others)


def _merge(
    buckets: Sequence[TokenRange], decisions: Sequence[Decision]
) -> list[tuple[TokenRange, Decision]]:
    merged: list[tuple[TokenRange, Decision]] = []
    for bucket, decision in zip(buckets, decisions, strict=True):
        if merged and _is_same(merged[-1][1], decision):
            merged[-1] = (TokenRange(merged[-1][0].low, bucket.high), decision)
        else:
            merged.append((bucket, decision))
    return merged


def _is_same(a: Decision, b: Decision) -> bool:
    """Same choice, and the same losers for the same causes; estimates may differ."""
    return a.choice.name == b.choice.name and _causes(a) == _causes(b)


def _causes(decision: Decision) -> set[tuple[str, str, str]]:
    return {
        (loser.name, reason.what, reason.found)
        for loser in decision.rejected
        for reason in loser.reasons
        if reason.kind is not ReasonKind.RANKED
    }
