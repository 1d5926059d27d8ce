"""Rows of two reports beside each other, and which of them are slower or faster: for every diff.

Observed times disperse. A row differs from a factor of `NOISE` in its time per call, and only where
rows that differ alike (of one op and phase, in whatever layer, served by the same) take `MIN_SHARE`
of the time of one of the reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hal.auditing.document import Row
from hal.auditing.summary import op_label

NOISE: Final = 2.0
MIN_SHARE: Final = 0.01

Direction = Literal["slower", "faster"]
Totals = tuple[float | None, float | None]
"""Observed time of the old and of the new report, in µs; None where nobody knows."""
Outcome = tuple[tuple[str, str, str, str], ...]
_Key = tuple[str, str, str, tuple[int, int] | None, str]


@dataclass(slots=True)
class RowPair:
    """Rows at one place of both reports; either list may be empty. direction: where their times
    differ and that counts."""

    old: list[Row]
    new: list[Row]
    direction: Direction | None = None

    @property
    def first(self) -> Row:
        """One of its rows, of the new report if it has one."""
        return (self.new or self.old)[0]

    @property
    def place(self) -> str:
        """Call site, or file and function: lines move when a file is edited."""
        return _place(self.first)


def matched_rows(old: Iterable[Row], new: Iterable[Row], totals: Totals) -> list[RowPair]:
    """Pairs by op, place, phase, tokens and arguments, in the old report's order. Rows of one key
    are several implementations at one place, or lines of one function."""
    pairs: dict[_Key, RowPair] = {}
    for row in old:
        pairs.setdefault(_key(row), RowPair([], [])).old.append(row)
    for row in new:
        pairs.setdefault(_key(row), RowPair([], [])).new.append(row)
    found = list(pairs.values())
    _judge(found, totals)
    return found


def _key(row: Row) -> _Key:
    return row.op, _place(row), row.phase, row.tokens, row.arguments


def _place(row: Row) -> str:
    place = row.location
    if row.site or place is None:
        return row.site
    return f"{place.file} {place.function}" if place.function else str(place)


def _judge(pairs: Iterable[RowPair], totals: Totals) -> None:
    alike: dict[tuple[Direction, object], list[RowPair]] = {}
    for pair in pairs:
        ratio = time_ratio(pair.old, pair.new)
        if ratio is None or 1 / NOISE <= ratio <= NOISE:
            continue
        first, served = pair.first, (outcome_of(pair.old), outcome_of(pair.new))
        kind = (op_label(first), first.tokens, served)
        alike.setdefault(("slower" if ratio > 1 else "faster", kind), []).append(pair)
    for (direction, _), found in alike.items():
        if _share(found, totals) >= MIN_SHARE:
            for pair in found:
                pair.direction = direction


def _share(pairs: Sequence[RowPair], totals: Totals) -> float:
    """The larger share of the time that they take, 1 where it is not known."""
    shares = []
    for sides, total in zip(
        ([pair.old for pair in pairs], [pair.new for pair in pairs]), totals, strict=True
    ):
        time_us = sum(row.time_us or 0.0 for rows in sides for row in rows)
        shares.append(time_us / total if total else 1.0)
    return max(shares)


def outcome_of(rows: Iterable[Row]) -> Outcome:
    """What of the rows is not a figure: a difference here is a change of what runs."""
    return tuple(
        sorted({(row.implementation, row.tier, row.state, row.leaf.state) for row in rows})
    )


def time_per_call(rows: Iterable[Row]) -> float | None:
    """In µs; None where none was timed."""
    timed = [(row.time_us, row.calls) for row in rows if row.time_us is not None and row.calls]
    calls = sum(number for _, number in timed)
    return sum(time for time, _ in timed) / calls if calls else None


def time_ratio(old: Iterable[Row], new: Iterable[Row]) -> float | None:
    """Time per call now over then; None where either is not known."""
    before, after = time_per_call(old), time_per_call(new)
    return after / before if before and after else None
