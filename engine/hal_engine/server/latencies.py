"""Latencies of the last minute, for the page: histograms say too little of so short a time."""

from __future__ import annotations

from collections import deque
from typing import Any

WINDOW_S = 60.0
_MOST = 2048  # of one kind, so that a summary costs well below a millisecond


class RecentLatencies:
    """The latest values of one latency, in seconds. One event loop adds and reads."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST)  # when, how long

    def add(self, now_s: float, value_s: float) -> None:
        """now_s: of the clock that `summary` is asked by."""
        self._values.append((now_s, value_s))

    def summary(self, now_s: float) -> dict[str, Any]:
        """Count, median and 95th percentile of the last minute (of at most 2,048 values; None
        where there are none), and the latest value ever."""
        while len(self._values) > 1 and self._values[0][0] < now_s - WINDOW_S:
            self._values.popleft()
        recent = sorted(value for when, value in self._values if when >= now_s - WINDOW_S)
        return {
            "count": len(recent),
            "p50_s": _quantile(recent, 0.5),
            "p95_s": _quantile(recent, 0.95),
            "last_s": round(self._values[-1][1], 6) if self._values else None,
        }


def _quantile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    if not ordered:
        return None
    index = -(-len(ordered) * share // 1)  # rounded up
    return round(ordered[max(int(index), 1) - 1], 6)
