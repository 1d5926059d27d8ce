"""What counts as better or worse between two contenders: the metrics, the margins, and the prices.

Each metric is compared by itself. Two of them have a price that belongs to them, and what a peer
pays by as much as it gains is a trade and no advantage:

- A peer whose code is of a lower tier than ours (it spills, or widens its operands) is no standard
  of bytes, loads or resident warps: ours could take the same tile and spill as well. Nor is one of
  which no block fits into a multiprocessor. `hal kernels tune` chooses by the same rule.
- Smaller tiles let more warps in, which hide the latency of memory, and ask for more bytes, which
  take time. Where a peer is better in one and worse in the other, the bytes that each resident
  warp has to move decide, which is the time as long as bytes in flight are what limits it.

The table names the trade of each metric, of several the peer that is best in it, with its price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.occupancy import occupancy_of_evidence
from kernel_peers.compiling import Finding

# Worse by less than this factor is the same: estimates of bytes leave out caches, and more warps
# help no longer once those that there are hide the latency of memory.
MARGINS = {"bytes": 1.02, "resident warps": 1.5}
_TIERS = ("error", "scalar", "emulated", "spilled", "native")
_PAIRED = {"bytes": "resident warps", "resident warps": "bytes"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What peers have better than ours. worse, traded: metric -> which peer, by what, and of a
    trade its price."""

    worse: Mapping[str, str]
    traded: Mapping[str, str]


def resident_warps(evidence: Evidence) -> int:
    """Warps that a multiprocessor holds; 0 where no block fits, or nothing compiles."""
    found = occupancy_of_evidence(evidence)
    return 0 if found is None else found.warps


def judge(own: Finding, peers: Sequence[Finding]) -> Verdict:
    """Ours against all: of the peers that are better in a metric, the best that pays no price for
    it, or else the best that does."""
    compiled = [peer for peer in peers if not peer.evidence.error]
    if own.evidence.error:
        able = ", ".join(peer.contender for peer in compiled)
        return Verdict({"tier": f"{able} compiles"} if able else {}, {})
    worse, traded = {}, {}
    for metric, value in _measures(own).items():
        better = [p for p in compiled if _differs(metric, _measures(p)[metric], value)]
        prices = {id(peer): _price(metric, peer, own) for peer in better}
        free = [peer for peer in better if not prices[id(peer)]]
        if better:
            best = min(free or better, key=lambda peer: _measures(peer)[metric])
            shown = f"{best.contender} {_shown(metric, best)}, ours {_shown(metric, own)}"
            price = prices[id(best)]
            (traded if price else worse)[metric] = f"{shown}; {price}" if price else shown
    return Verdict(worse, traded)


def dominates(one: Finding, other: Finding) -> bool:
    """Whether one is nowhere worse, and better in something. Without a regard to prices: who is
    better in nothing but what was traded is worse in the price."""
    if one.evidence.error or other.evidence.error:
        return not one.evidence.error and bool(other.evidence.error)
    first, second = _measures(one), _measures(other)
    is_worse = any(_differs(m, second[m], first[m]) for m in first)
    return not is_worse and any(_differs(m, first[m], second[m]) for m in first)


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


def _price(metric: str, peer: Finding, own: Finding) -> str:
    """What a peer that is better in the metric pays for it, as the module says; "" for nothing."""
    if metric in ("tier", "spills"):
        return ""
    theirs, ours = _measures(peer), _measures(own)
    if theirs["tier"] > ours["tier"]:
        spilled = f", {peer.evidence.spills} words a thread" if peer.evidence.spills else ""
        return f"its code is {peer.evidence.tier}{spilled}"
    if not theirs["resident warps"] and ours["resident warps"]:
        return "no block of it fits"
    other = _PAIRED.get(metric, "")
    if not other or not _differs(other, ours[other], theirs[other]):
        return ""
    each, own_each = (f.moved_bytes / max(1, resident_warps(f.evidence)) for f in (peer, own))
    if each * MARGINS["bytes"] < own_each:
        return ""
    return f"it pays with {other}: {_shown(other, peer)}, ours {_shown(other, own)}"


def _shown(metric: str, found: Finding) -> str:
    if metric == "tier":
        return found.evidence.tier
    if metric == "bytes":
        return f"{found.moved_bytes / 2**20:,.1f} MiB"
    return f"{abs(_measures(found)[metric]):.0f}"
