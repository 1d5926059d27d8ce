"""Calls that one kernel can do the work of: which of them a plan joins, and up to which size.

A model lists beside its call sites the joined sites: one op that does what several sites do in a
row. A plan takes a joined site, from the smallest size on, where a candidate serves it at a tier no
worse than each part's and where, if both are estimated, it gains over the parts together; the parts
keep the larger sizes. Where it is offered and not taken the plan says why, unless an earlier join
has its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hal.errors import SelectionError, UnservedRequestError
from hal.ops.request import OpRequest, Phase, TokenRange
from hal.plan import OpSite
from hal.ranges import MIN_GAIN_OF_SWITCH, token_buckets
from hal.selection import Decision

Choose = Callable[[OpRequest], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedPart:
    """A site that a joined one does the work of. shift: its layer less the joined site's. phase: of
    the site; a part that is called in any phase stays for the others where the joined site has one.
    """

    site: str
    shift: int = 0
    phase: Phase = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSite:
    """One call in place of several, in layers in which all of them are.

    needs_gain: False for a call that is its first part with less to store and fewer launches behind
    it, which estimates do not count: it is taken where its tier is no worse than that part's and it
    is not estimated to be slower, unless nobody measured its configuration and that of its first
    part needs no such measurement.
    """

    site: OpSite
    parts: tuple[JoinedPart, ...]
    needs_gain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSites:
    """The sites of a plan after joining, and what it says of joins that were offered."""

    sites: Sequence[OpSite]
    notes: Sequence[str]


def join_sites(
    sites: Sequence[OpSite],
    joins: Sequence[JoinedSite],
    choose: Choose,
    *,
    offered: Callable[[str], bool],
    explicit: Collection[str],
) -> JoinedSites:
    """Decides every join.

    choose(request): the selection for one size; raises UnservedRequestError where nothing serves.
    offered(op): whether the device has a candidate at all. explicit: ops that the user chose an
    implementation for; where a part is among them and the joined op is not, the calls stay apart.
    A choice for an op that is the joined one's and a part's as well holds for both, and is no wish
    to join them.
    """
    current = list(sites)
    apart: dict[tuple[str, str], list[str]] = {}
    for join in joins:
        op = join.site.request.op
        if not offered(op) and op not in explicit:
            continue
        for layers, parts in _same_parts(current, join):
            others = [p.request for p in parts if p.request.op != op]
            is_wished = op in explicit and len(others) == len(parts)
            part = next((p for p in others if _is_explicit(p, explicit)), None)
            if part is not None and not is_wished:
                reason = f"an implementation of {part.label} was chosen explicitly"
                high = 0
            else:
                is_shared = op in explicit and not is_wished
                high, reason = _most_tokens(
                    join, parts, choose, is_wished=is_wished, is_shared=is_shared
                )
            if reason:
                sizes = f"above {high} tokens" if high else "at any size"
                label = replace(join.site, layers=layers).label()
                apart.setdefault((op, f"{sizes}: {reason}"), []).append(label)
            if high:
                current = _joined(current, join, layers, high)
    notes = [
        f"{op} in place of its parts is not planned {why} ({', '.join(labels)})"
        for (op, why), labels in apart.items()
    ]
    return JoinedSites(sites=current, notes=notes)


def _is_explicit(request: OpRequest, explicit: Collection[str]) -> bool:
    return request.label in explicit or request.op in explicit


def _same_parts(
    sites: Sequence[OpSite], join: JoinedSite
) -> list[tuple[tuple[int, ...], tuple[OpSite, ...]]]:
    """The layers of a join, together where their parts are the same sites; others are left out."""
    found: dict[tuple[OpSite, ...], list[int]] = {}
    for layer in join.site.layers:
        parts = [_site_of(sites, part, layer, join.site.ranks) for part in join.parts]
        # What another join has the smallest sizes of is not joined once more above them.
        low = join.site.request.tokens.low
        known = tuple(p for p in parts if p is not None and p.request.tokens.low <= low)
        if len(known) == len(parts):
            found.setdefault(known, []).append(layer)
    return [(tuple(layers), parts) for parts, layers in found.items()]


def _site_of(
    sites: Sequence[OpSite], part: JoinedPart, layer: int, ranks: tuple[int, ...]
) -> OpSite | None:
    for site in sites:
        is_part = site.site == part.site and site.request.phase == part.phase
        if is_part and layer + part.shift in site.layers and site.ranks == ranks:
            return site
    return None


def _most_tokens(
    join: JoinedSite,
    parts: Sequence[OpSite],
    choose: Choose,
    *,
    is_wished: bool,
    is_shared: bool,
) -> tuple[int, str]:
    """The largest size up to which the joined call is no worse, 0 for none, and what ends it.

    is_wished: the user chose its implementation, which is taken as far as it can serve. Raises
    SelectionError if that is not even the smallest size. is_shared: it was chosen for a part, whose
    op is the same, and may not serve the joined call, which is no error then.
    """
    most, request = 0, join.site.request
    for bucket in token_buckets(request.tokens):
        try:
            whole = choose(request.with_tokens(bucket))
        except SelectionError as error:
            if most == 0 and not (is_shared or isinstance(error, UnservedRequestError)):
                raise
            return most, error.found
        reason = "" if is_wished else _why_apart(join, whole, bucket, parts, choose)
        if reason:
            return most, reason
        most = bucket.high
    return most, ""


def _why_apart(
    join: JoinedSite,
    whole: Decision,
    bucket: TokenRange,
    parts: Sequence[OpSite],
    choose: Choose,
) -> str:
    """Why the parts serve one size better; "" where they do not."""
    decisions = []
    for part in parts:
        try:
            decisions.append(choose(part.request.with_tokens(bucket)))
        except UnservedRequestError:
            return ""  # apart, nothing serves
    # A call that is its first part, with what lies behind, is no slower for what the others are.
    compared = decisions if join.needs_gain else decisions[:1]
    if whole.lost is not None or any(d.choice.tier > whole.choice.tier for d in compared):
        return _why_lower(whole)
    apart = [d.estimate_us for d in decisions]
    together = whole.estimate_us
    if together is not None and None not in apart:
        total = sum(time for time in apart if time is not None)
        if together <= total * (1.0 - MIN_GAIN_OF_SWITCH):
            return ""
        if join.needs_gain or together > total:
            return f"{whole.choice.name} is estimated at {together:.1f} µs, apart {total:.1f} µs"
    first = decisions[0].choice
    if not join.needs_gain and whole.choice.untuned and not first.untuned:
        without = f"configured without a measurement ({whole.choice.untuned})"
        return f"{whole.choice.name} is {without}, {first.name} is not"
    return ""


def _why_lower(whole: Decision) -> str:
    """Why nothing better than the choice serves the joined call."""
    better = [loser for loser in whole.rejected if loser.tier > whole.choice.tier]
    losers = "; ".join(f"{x.name}: {', '.join(map(str, x.reasons))}" for x in better)
    return losers or f"{whole.choice.name} is {whole.choice.tier.label}, the parts are better"


def _joined(
    sites: Sequence[OpSite], join: JoinedSite, layers: tuple[int, ...], high: int
) -> list[OpSite]:
    """The sites with the joined one before its first part, and the parts cut to larger sizes."""
    request = join.site.request
    tokens = TokenRange(request.tokens.low, high)
    whole = replace(join.site, layers=layers, request=request.with_tokens(tokens))
    shifts: Mapping[tuple[str, str], int] = {(p.site, p.phase): p.shift for p in join.parts}
    result: list[OpSite] = []
    for site in sites:
        shift = shifts.get((site.site, site.request.phase))
        taken = () if shift is None else tuple(n for n in site.layers if n - shift in layers)
        if not taken or site.ranks != join.site.ranks:
            result.append(site)
            continue
        if whole not in result:
            result.append(whole)
        others = tuple(n for n in site.layers if n not in taken)
        if others:
            result.append(replace(site, layers=others))
        result += [
            replace(site, layers=taken, request=r) for r in _left(site.request, request, high)
        ]
    return result


def _left(part: OpRequest, whole: OpRequest, high: int) -> list[OpRequest]:
    """What of a part is called still, where the joined call has its sizes up to `high`: the larger
    ones; and, of one that is called in any phase, all sizes of the phase that is not joined."""
    left = []
    most = part.tokens.high
    if part.phase != whole.phase:
        left.append(replace(part, phase="prefill" if whole.phase == "decode" else "decode"))
        part, most = replace(part, phase=whole.phase), whole.tokens.high
    if most > high:
        left.append(part.with_tokens(TokenRange(high + 1, most)))
    return left
