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
from hal.plan import OpSite, PlannedOp
from hal.roofline import Bound, bound_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the engine: a number of tokens in one phase.

    A decode step samples a row for each of its tokens; a prefill step is the last chunk of one
    prompt, and samples the row of its last token.
    """

    phase: Phase
    tokens: int

    @property
    def sampled_rows(self) -> int:
        """Rows that get logits."""
        return 1 if self.phase == "prefill" else self.tokens

    def rows_of(self, site: OpSite) -> int:
        """Rows that the step calls the site with."""
        rows = self.sampled_rows if site.is_sampled else self.tokens
        return min(rows, site.request.tokens.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCost:
    """One site of a step, all its layers. rows: of each call. us: None where no rate is known; by:
    as of `Bound`. lost_us: at least so much less would the better implementation take; None where
    nothing is lost or known."""

    site: str
    op: str
    choice: str
    tier: str
    calls: int
    rows: int
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
    def partial(self) -> tuple[str, ...]:
        """Sites whose bound is of the bytes alone or of the operations alone."""
        return tuple(site.site for site in self.sites if (site.by or "").endswith("only"))

    @property
    def is_telling(self) -> bool:
        """Whether the bytes of at least half of the sites are counted: without the bandwidth, a sum
        of operations says next to nothing of a step."""
        silent = [site for site in self.sites if site.us is None or site.by == "compute only"]
        return bool(self.sites) and 2 * len(silent) <= len(self.sites)

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
            "partial": list(self.partial),
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
        _site_cost(op, step.rows_of(op.site), device, link) for op in called_ops(ops, step)
    )
    return StepEstimate(phase=step.phase, tokens=step.tokens, sites=sites)


def called_ops(ops: Sequence[PlannedOp], step: Step) -> list[PlannedOp]:
    """What a step calls, in the order of `StepEstimate.sites`."""
    return [
        op
        for op in ops
        if op.site.request.phase in (step.phase, "any")
        and 0 in op.site.ranks
        and op.tokens.low <= step.rows_of(op.site) <= op.tokens.high
    ]


def _site_cost(op: PlannedOp, rows: int, device: DeviceSpec, link: GroupLink | None) -> SiteCost:
    request, calls = op.site.request, max(1, len(op.site.layers))
    bound = bound_of(request, rows, device, candidate=op.choice, link=link)
    lost_us = None
    if op.decision.lost is not None and bound is not None:
        ideal = bound_of(request, rows, device, candidate=op.better, link=link)
        if ideal is not None and _are_comparable(bound, ideal):
            lost_us = max(0.0, bound.us - ideal.us) * calls
    return SiteCost(
        site=op.site.site,
        op=request.label,
        choice=op.choice.name,
        tier=op.choice.tier.label,
        calls=calls,
        rows=rows,
        us=_times(bound, calls),
        by=None if bound is None else bound.by,
        better=None if op.decision.lost is None else op.decision.lost.better,
        lost_us=lost_us,
    )


def _are_comparable(bound: Bound, ideal: Bound) -> bool:
    """Against half of the better one's work, a difference would be no lower limit."""
    return not ideal.is_partial or ideal.by == bound.by


def _times(bound: Bound | None, calls: int) -> float | None:
    return None if bound is None else bound.us * calls
