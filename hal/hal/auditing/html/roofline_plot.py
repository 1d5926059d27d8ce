"""The roofline plot: what each row achieved, under what the device could do.

Arithmetic intensity against FLOP/s, both logarithmic, after
https://doi.org/10.1145/1498765.1498785. Coordinates are percentages of the plot's area, so that
one drawing serves a phone and a wide screen with text of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from hal.auditing.document import AuditReport, Machine, Row
from hal.auditing.html.places import place_of, tokens_text
from hal.auditing.html.quantities import count, duration, power_of_ten, quantity, share, significant
from hal.auditing.html.shown_text import tooltip
from hal.auditing.html.tier_marks import TierMark, row_mark

_MAX_TICKS: Final = 8
_SAME_LABEL: Final = 4.2
"""Ceilings closer than this, in percent of the height, share a label."""


@dataclass(frozen=True, slots=True)
class Tick:
    """at: percent along its axis, from left or from top."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A peak rate: from (x, y), where memory can feed it, to the right edge. label: "" where a
    close one has it."""

    x: float
    y: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Slope:
    """What memory can feed: from (x1, y1) up to (x2, y2). name_x, name_y: beside what point its
    name is; above it, where nothing else can be, if there is room to the left."""

    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def name_x(self) -> float:
        return self.x1 + 0.75 * (self.x2 - self.x1)

    @property
    def name_y(self) -> float:
        return self.y1 + 0.75 * (self.y2 - self.y1)

    @property
    def is_name_above(self) -> bool:
        return self.name_x > 30


@dataclass(frozen=True, slots=True)
class Point:
    """A row. index: in the report. size: 1 to 3, by its share of the time."""

    x: float
    y: float
    mark: TierMark
    size: int
    title: Markup
    index: int


@dataclass(frozen=True, slots=True)
class RooflinePlot:
    """The plot. roofs: each rate in words. num_left_out: rows that ran and lack FLOPs, bytes or
    time."""

    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    ceilings: tuple[Ceiling, ...]
    slope: Slope | None
    points: tuple[Point, ...]
    roofs: tuple[str, ...]
    num_left_out: int
    is_measured: bool


@dataclass(frozen=True, slots=True)
class _Axis:
    """log10 of both ends."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Percent along the axis."""
        return 100 * (math.log10(value) - self.low) / (self.high - self.low)


def roofline_plot(report: AuditReport, whole_us: float | None) -> RooflinePlot | None:
    """The plot of a report; None where no row has FLOPs, bytes and time."""
    drawn = [
        (index, row)
        for index, row in enumerate(report.rows)
        if row.flops > 0 and row.bytes > 0 and row.time_us
    ]
    if not drawn:
        return None
    peaks = {name: rate for name, rate in report.machine.peak_flops.items() if rate > 0}
    bandwidth = report.machine.memory_bandwidth or 0.0
    rates = [_rate(row) for _, row in drawn]
    ridges = [peak / bandwidth for peak in peaks.values()] if bandwidth else []
    x = _axis([row.flops / row.bytes for _, row in drawn] + ridges)
    y = _axis(rates + list(peaks.values()))
    drawn.sort(key=lambda item: (-(item[1].time_us or 0.0), item[0]))
    return RooflinePlot(
        x_ticks=_ticks(x, is_vertical=False),
        y_ticks=_ticks(y, is_vertical=True),
        ceilings=_ceilings(peaks, bandwidth, x, y),
        slope=_slope(report.machine, max(peaks.values(), default=0.0), x, y),
        points=tuple(_point(index, row, x, y, whole_us) for index, row in drawn),
        roofs=_roofs(peaks, bandwidth),
        num_left_out=sum(row.calls > 0 for row in report.rows) - len(drawn),
        is_measured=report.machine.is_measured,
    )


def _rate(row: Row) -> float:
    """FLOP/s over the time inside the calls."""
    return row.flops / (row.time_us or math.inf) * 1e6


def _axis(values: Sequence[float]) -> _Axis:
    low = math.log10(min(values)) - 0.25
    high = math.log10(max(values)) + 0.3
    if high - low < 2:
        middle = (high + low) / 2
        low, high = middle - 1, middle + 1
    return _Axis(low, high)


def _ticks(axis: _Axis, *, is_vertical: bool) -> tuple[Tick, ...]:
    first, last = math.ceil(axis.low), math.floor(axis.high)
    step = max(1, math.ceil((last - first + 1) / _MAX_TICKS))
    ticks = []
    for exponent in range(first, last + 1, step):
        along = 100 * (exponent - axis.low) / (axis.high - axis.low)
        ticks.append(Tick(100 - along if is_vertical else along, _power(exponent)))
    return tuple(ticks)


def _power(exponent: int) -> str:
    """`0.01`, `10`, `1 k`, `100 G`; beyond the prefixes a power of ten."""
    if -3 <= exponent < 3:
        return (
            significant(10.0**exponent).removesuffix(".00").removesuffix(".0").rstrip("0")
            if (exponent < 0)
            else str(10**exponent)
        )
    if 3 <= exponent < 21:
        return f"{10 ** (exponent % 3)} {'kMGTPE'[exponent // 3 - 1]}"
    return power_of_ten(exponent)


def _ceilings(
    peaks: Mapping[str, float], bandwidth: float, x: _Axis, y: _Axis
) -> tuple[Ceiling, ...]:
    """One line per dtype, highest first; lines that lie close share the label of the highest."""
    clusters: list[list[tuple[str, float]]] = []
    for name, peak in _highest_first(peaks):
        if clusters and y.at(clusters[-1][0][1]) - y.at(peak) < _SAME_LABEL:
            clusters[-1].append((name, peak))
        else:
            clusters.append([(name, peak)])
    ceilings = []
    for cluster in clusters:
        first, more = cluster[0][0], len(cluster) - 1
        label = (first if len(first) <= 10 else f"{first[:9]}…") + (f" +{more}" if more else "")
        for number, (name, peak) in enumerate(cluster):
            start = x.at(peak / bandwidth) if bandwidth else 0.0
            title = f"peak of {name}: {quantity(peak, 'FLOP/s')}"
            ceilings.append(Ceiling(start, 100 - y.at(peak), "" if number else label, title))
    return tuple(ceilings)


def _highest_first(peaks: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(peaks.items(), key=lambda item: (-item[1], item[0]))


def _roofs(peaks: Mapping[str, float], bandwidth: float) -> tuple[str, ...]:
    memory = [f"memory {quantity(bandwidth, 'B/s')}"] if bandwidth else []
    return (*memory, *(f"{name} {quantity(r, 'FLOP/s')}" for name, r in _highest_first(peaks)))


def _slope(machine: Machine, highest: float, x: _Axis, y: _Axis) -> Slope | None:
    bandwidth = machine.memory_bandwidth
    if not bandwidth or bandwidth < 0:
        return None
    # In logarithms the slope is y = x + log10(bandwidth); it is cut at the edges of the area.
    shift = math.log10(bandwidth)
    start = max(x.low, y.low - shift)
    end = min(x.high, y.high - shift, math.log10(highest) - shift if highest else math.inf)
    if start >= end:
        return None
    return Slope(
        x1=x.at(10**start),
        y1=100 - y.at(10 ** (start + shift)),
        x2=x.at(10**end),
        y2=100 - y.at(10 ** (end + shift)),
    )


def _point(index: int, row: Row, x: _Axis, y: _Axis, whole_us: float | None) -> Point:
    part = (row.time_us or 0.0) / whole_us if whole_us else 0.0
    rate, intensity = _rate(row), row.flops / row.bytes
    tokens = f", {tokens_text(row.tokens)}" if row.tokens else ""
    phase = "" if row.phase == "any" else f", {row.phase}"
    mark = row_mark(row)
    lines = [
        f"{place_of(row) or row.op} ({row.op}{phase}{tokens})",
        f"{mark.name}, {row.implementation}",
        f"{quantity(rate, 'FLOP/s')} at {significant(intensity)} FLOP/byte",
        f"{quantity(row.bytes / (row.time_us or math.inf) * 1e6, 'B/s')}, "
        f"{duration(row.time_us)} in {count(row.calls)} calls"
        + (f", {share(part)} of the time" if part else ""),
    ]
    if row.achieved is not None:
        lines.append(f"{share(row.achieved)} of its bound ({row.bound_by or 'roofline'})")
    return Point(
        x=x.at(intensity),
        y=100 - y.at(rate),
        mark=mark,
        size=3 if part >= 0.05 else 2 if part >= 0.01 else 1,
        title=tooltip(lines),
        index=index,
    )
