"""The heat map: where in the model, or in the program, which tier ran.

Of a model, columns are layers (of very many, several to a column) and rows the call sites of a
layer, by phase. Of a program, columns
are op families and rows source lines, those that take most time first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from markupsafe import Markup

from hal.auditing.document import AuditReport, Row
from hal.auditing.html.places import (
    group_place,
    layers_text,
    place_of,
    short_site,
    site_pattern,
    tokens_text,
)
from hal.auditing.html.quantities import count, duration, share
from hal.auditing.html.shown_text import tooltip
from hal.auditing.html.tier_marks import TierMark, row_mark
from hal.auditing.quantities import plural

MAX_COLUMNS: Final = 128
"""Columns of a model's map; adjacent layers share one beyond that."""
MAX_LINES: Final = 60
"""Rows of a program's map; the table has all of them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """column: its number. span: how many columns it lies over. filter: text that leaves only its
    rows in the table of rows."""

    column: int
    span: int
    mark: TierMark
    text: str
    title: Markup
    filter: str


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the map. title: its place in full. cells: in order of columns, None where nothing
    is."""

    label: str
    detail: str
    title: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Lines under one heading, a phase. heading: "" where there is but one."""

    heading: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """columns: heads, in order; of several layers the first. is_dense: cells have a letter, not a
    word. num_hidden: lines of a program that are not drawn."""

    axis: str
    columns: tuple[str, ...]
    bands: tuple[Band, ...]
    is_dense: bool
    num_hidden: int = 0
    layers_per_column: int = 1

    @property
    def marks(self) -> frozenset[str]:
        """Names of the marks in it."""
        cells = (cell for band in self.bands for line in band.lines for cell in line.cells)
        return frozenset(cell.mark.name for cell in cells if cell is not None)


def heat_map(report: AuditReport, whole_us: float | None) -> HeatMap | None:
    """The map of a report; None where there is nothing to draw. whole_us: what shares are of."""
    if any(row.layer is not None for row in report.rows):
        return _by_layer(report.rows, whole_us)
    return _by_line(report.rows, whole_us) if report.rows else None


def _by_layer(rows: Sequence[Row], whole_us: float | None) -> HeatMap:
    columns = _columns({row.layer for row in rows if row.layer is not None})
    column_of = {layer: column for column, layers in enumerate(columns) for layer in layers}
    phases: dict[str, dict[tuple[str, bool], list[Row]]] = {}
    outside: dict[str, list[Row]] = {}
    for row in rows:
        if not row.site and row.layer is None:
            outside.setdefault(row_mark(row).name, []).append(row)
            continue
        key = (site_pattern(row.site, row.layer) or row.op, row.layer is not None)
        phases.setdefault(row.phase, {}).setdefault(key, []).append(row)
    bands = []
    for phase, lines in phases.items():
        drawn = tuple(
            _layer_line(found, column_of if has_layers else {}, len(columns), whole_us)
            for (_, has_layers), found in lines.items()
        )
        heading = "any phase" if phase == "any" else phase
        bands.append(Band(heading if len(phases) > 1 or phase != "any" else "", drawn))
    if outside:
        drawn = tuple(_outside_line(found, len(columns), whole_us) for found in outside.values())
        bands.append(Band("outside call sites", drawn))
    heads = tuple(str(layers[0]) for layers in columns)
    size = max(map(len, columns))
    return HeatMap("layer", heads, tuple(bands), is_dense=True, layers_per_column=size)


def _columns(layers: Iterable[int]) -> list[list[int]]:
    """The layers of each column."""
    ordered = sorted(layers)
    size = max(1, math.ceil(len(ordered) / MAX_COLUMNS))
    return [ordered[first : first + size] for first in range(0, len(ordered), size)]


def _layer_line(
    rows: Sequence[Row], column_of: Mapping[int, int], num_columns: int, whole_us: float | None
) -> Line:
    first = rows[0]
    label = short_site(first.site, first.layer) or first.op
    detail = _names(row.implementation for row in rows)
    site = site_pattern(first.site, first.layer)
    if not column_of:
        return Line(label, detail, site, (_cell(0, num_columns, rows, whole_us, is_word=True),))
    by_column: dict[int, list[Row]] = {}
    for row in rows:
        if row.layer is not None:
            by_column.setdefault(column_of[row.layer], []).append(row)
    cells = tuple(
        _cell(column, 1, by_column[column], whole_us) if column in by_column else None
        for column in range(num_columns)
    )
    return Line(label, detail, site, cells)


def _outside_line(rows: Sequence[Row], num_columns: int, whole_us: float | None) -> Line:
    """What belongs to no call site, of one tier: one line, or such ops would bury the model."""
    mark = row_mark(rows[0])
    cell = _cell(0, num_columns, rows, whole_us, is_word=True, has_share=True)
    ordered = sorted(rows, key=lambda row: -(row.time_us or 0.0))
    places = [f"{place_of(row)} {row.op}, {duration(row.time_us)}" for row in ordered[:8]]
    more = [f"and {count(len(rows) - 8)} more"] if len(rows) > 8 else []
    cell = replace(cell, filter=mark.name, title=tooltip([f"{mark.name}:", *places, *more]))
    return Line(
        plural(len({row.op for row in rows}), "op"),
        _names(row.op for row in ordered),
        "",
        (cell,),
    )


def _by_line(rows: Sequence[Row], whole_us: float | None) -> HeatMap:
    columns = list(dict.fromkeys(row.op for row in rows))
    by_place: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_place.setdefault(place_of(row) or row.phase, {}).setdefault(row.op, []).append(row)
    ordered = sorted(by_place.items(), key=lambda item: (-_time(item[1]), item[0]))
    is_dense = len(columns) > 6
    lines = tuple(
        Line(
            PurePosixPath(place).name or place,
            _names(row.implementation for found in ops.values() for row in found),
            place,
            tuple(
                _cell(column, 1, ops[op], whole_us, has_share=not is_dense) if op in ops else None
                for column, op in enumerate(columns)
            ),
        )
        for place, ops in ordered[:MAX_LINES]
    )
    hidden = max(0, len(ordered) - MAX_LINES)
    return HeatMap("op", tuple(columns), (Band("", lines),), is_dense, hidden)


def _time(ops: dict[str, list[Row]]) -> float:
    return sum(row.time_us or 0.0 for rows in ops.values() for row in rows)


def _cell(
    column: int,
    span: int,
    rows: Sequence[Row],
    whole_us: float | None,
    *,
    is_word: bool = False,
    has_share: bool = False,
) -> Cell:
    """A cell shows the worst of what ran in it: its letter, word, or letter and share of time."""
    ran = [row for row in rows if row.state != "never-exercised"] or rows
    worst = min((row_mark(row) for row in ran), key=lambda mark: mark.rank)
    text = worst.name if is_word else worst.letter
    time_us = sum(row.time_us or 0.0 for row in rows)
    if has_share and time_us and whole_us:
        text = f"{text} {share(time_us / whole_us)}"
    return Cell(
        column=column,
        span=span,
        mark=worst,
        text=text,
        title=tooltip(_describe(rows, whole_us)),
        filter=_filter_of(rows),
    )


def _filter_of(rows: Sequence[Row]) -> str:
    """What finds the rows of a cell: their place, of several layers the call site behind them."""
    places = {place_of(row) for row in rows}
    if len(places) == 1:
        return places.pop() or rows[0].op
    return short_site(rows[0].site, rows[0].layer) or rows[0].op


def _describe(rows: Sequence[Row], whole_us: float | None) -> Iterable[str]:
    """What a tooltip says: the place, and a line for each implementation in it."""
    first = rows[0]
    phase = "" if first.phase == "any" else f", {first.phase}"
    layers = layers_text(row.layer for row in rows if row.layer is not None)
    is_one = len({row.layer for row in rows}) == 1
    place = place_of(first) if is_one else f"{group_place(first)}, {layers}"
    yield f"{place or first.op} ({first.op}{phase})"
    most = 6 if is_one else 2
    for row in rows[:most]:
        tokens = f"{tokens_text(row.tokens)}: " if row.tokens and len(rows) > 1 else ""
        if row.state == "never-exercised":
            yield f"{tokens}{row.implementation}: never exercised"
            continue
        time = "" if row.time_us is None else f", {duration(row.time_us)}"
        part = share(row.time_us / whole_us) if row.time_us and whole_us else ""
        yield (
            f"{tokens}{row_mark(row).name}, {row.implementation}, {count(row.calls)} calls{time}"
            f"{f' ({part})' if part else ''}"
        )
        if row.losers:
            yield f"better, did not run: {_names(loser.name for loser in row.losers)}"
    if len(rows) > most:
        yield f"and {count(len(rows) - most)} more"


def _names(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" +{len(distinct) - 2}" if len(distinct) > 2 else ""
    return ", ".join(distinct[:2]) + more
