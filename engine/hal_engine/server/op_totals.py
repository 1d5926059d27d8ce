"""Calls of bound ops, summed over call sites: one row per site would be hundreds for a deep model.

Which rows `/metrics` and `/v1/hal/status` have follows from the plan alone: ops, phases and tiers
come from closed lists, implementations and token ranges from the plan, so their number is bounded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from hal_engine.api import OpCallCount

_MAX_NAME = 120  # of an implementation, which a plug-in names

# op, phase, implementation, tier, token range
OpKey = tuple[str, str, str, str, str]
OP_LABELS = ("op", "phase", "implementation", "tier", "token_range")


def op_totals(rows: Iterable[OpCallCount]) -> dict[OpKey, int]:
    """Calls by op, phase, implementation, tier and token range, in that order."""
    totals: defaultdict[OpKey, int] = defaultdict(int)
    for row in rows:
        totals[row.op, row.phase, row.implementation, row.tier, row.token_range] += row.calls
    shown: defaultdict[OpKey, int] = defaultdict(int)
    for (op, phase, implementation, tier, tokens), calls in sorted(totals.items()):
        shown[op, phase, _shown(implementation), tier, tokens] += calls
    return dict(shown)


def totals_without_ranges(totals: Mapping[OpKey, int]) -> dict[tuple[str, str, str, str], int]:
    """The same, summed over token ranges."""
    result: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    for (op, phase, implementation, tier, _), calls in totals.items():
        result[op, phase, implementation, tier] += calls
    return dict(result)


def _shown(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
