"""What a step costs at least, op by op, and what each lost fast path costs of it.

All times are rooflines: the least that the work of an implementation can take. A lost path costs
the difference between the bounds of what runs and of what should run, so it is a lower limit, and
0 where both do the same work and only differ in how well they do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hal.device import DeviceSpec
from hal.device_group import GroupLink
from hal.ops.request import Phase
from hal.plan import PlannedOp
from hal.roofline import Bound, bound_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the engine: a number of tokens in one phase."""

    phase: Phase
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCost:
    """One site of a step, all its layers. us: None where a rate is not known. lost_us: at least
    so much less would the better implementation take; None where nothing is lost or known."""

    site: str
    op: str
    choice: str
    tier: str
    calls: int
    us: float | None
    by: str | None
    better: str | None = None
    lost_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """A step as the sum of its sites. Only the busiest rank's calls count."""

    phase: Phase
    tokens: int
    sites: tuple[SiteCost, ...]

    @property
    def total_us(self) -> float:
        """Sum over the sites whose bound is known."""
        return sum(site.us for site in self.sites if site.us is not None)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Sites without a bound, because a rate of the device or the link is not known."""
        return tuple(site.site for site in self.sites if site.us is None)

    @property
    def is_telling(self) -> bool:
        """Whether at least half of the sites have a bound: the sum of fewer says nothing."""
        return bool(self.sites) and 2 * len(self.unknown) <= len(self.sites)

    @property
    def lost_us(self) -> float:
        return sum(site.lost_us for site in self.sites if site.lost_us is not None)

    def share(self, us: float | None) -> float | None:
        """A time as a share of the step."""
        return None if us is None or not self.total_us else us / self.total_us

    def to_dict(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "tokens": self.tokens,
            "total_us": round(self.total_us, 2),
            "lost_us": round(self.lost_us, 2),
            "unknown": list(self.unknown),
            "sites": [
                {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(site).items()}
                | {"share": self.share(site.us), "lost_share": self.share(site.lost_us)}
                for site in self.sites
            ],
        }


def estimate_step(
    ops: Sequence[PlannedOp], step: Step, device: DeviceSpec, link: GroupLink | None = None
) -> StepEstimate:
    """The sites that a step calls, each with the range that its number of tokens falls into."""
    sites = tuple(
        _site_cost(op, step.tokens, device, link) for op in called_ops(ops, step.phase, step.tokens)
    )
    return StepEstimate(phase=step.phase, tokens=step.tokens, sites=sites)


def called_ops(ops: Sequence[PlannedOp], phase: Phase, tokens: int) -> list[PlannedOp]:
    """What a step with so many tokens calls, in the order of `StepEstimate.sites`."""
    return [
        op
        for op in ops
        if op.site.request.phase in (phase, "any")
        and 0 in op.site.ranks
        and _is_range_of(op, tokens)
    ]


def _is_range_of(op: PlannedOp, tokens: int) -> bool:
    """A step with more tokens than a site ever sees (sampling) calls it at its most."""
    tokens = min(tokens, op.site.request.tokens.high)
    return op.tokens.low <= tokens <= op.tokens.high


def _site_cost(op: PlannedOp, tokens: int, device: DeviceSpec, link: GroupLink | None) -> SiteCost:
    request, calls = op.site.request, max(1, len(op.site.layers))
    tokens = min(tokens, request.tokens.high)
    bound = bound_of(request, tokens, device, candidate=op.choice, link=link)
    lost_us = None
    if op.decision.lost is not None and bound is not None:
        ideal = bound_of(request, tokens, device, candidate=op.better, link=link)
        lost_us = None if ideal is None else max(0.0, bound.us - ideal.us) * calls
    return SiteCost(
        site=op.site.site,
        op=request.label,
        choice=op.choice.name,
        tier=op.choice.tier.label,
        calls=calls,
        us=_times(bound, calls),
        by=None if bound is None else bound.by,
        better=None if op.decision.lost is None else op.decision.lost.better,
        lost_us=lost_us,
    )


def _times(bound: Bound | None, calls: int) -> float | None:
    return None if bound is None else bound.us * calls
