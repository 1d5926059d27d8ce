"""The table of rows: everything that was observed or planned, one line each, ready to be sorted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hal.auditing.document import Row
from hal.auditing.html.condensed import Condensed
from hal.auditing.html.places import place_of, tokens_text
from hal.auditing.html.quantities import count, duration, quantity, share
from hal.auditing.html.tier_marks import TierMark, is_loss, row_mark

STATE_TEXTS = {
    "planned": "",
    "observed": "",
    "never-exercised": "never exercised",
    "not-planned": "not planned",
}
LEAF_TEXTS = {
    "seen": "seen",
    "other": "other leaf ran",
    "not-observed": "not observed",
    "not-declared": "",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row as texts. index: in the report, by which the script finds the numbers to sort by.
    loser: number of its group among the losers, None without losers. bar: percent of the bound.
    is_sum: of several rows, which the page has not."""

    index: int
    place: str
    op: str
    phase: str
    tokens: str
    arguments: str
    implementation: str
    mark: TierMark
    tier: str
    state: str
    calls: str
    time: str
    share: str
    achieved: str
    bar: float
    bound_by: str
    rate: str
    leaf: str
    is_leaf_bad: bool
    num_losers: int
    loser: int | None
    is_loss: bool
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class RowTable:
    """All rows in the report's order, and what the filters offer."""

    rows: tuple[TableRow, ...]
    ops: tuple[str, ...]
    tiers: tuple[str, ...]
    phases: tuple[str, ...]
    num_losses: int


def row_table(
    inside: Condensed, whole_us: float | None, loser_of: Sequence[int | None]
) -> RowTable:
    """The table of what a page has inside. loser_of: for each row, the number of its group of
    losers."""
    rows = tuple(
        replace(_table_row(index, row, whole_us, loser_of[index]), is_sum=len(numbers) > 1)
        for index, (row, numbers) in enumerate(zip(inside.report.rows, inside.sources, strict=True))
    )
    return RowTable(
        rows=rows,
        ops=tuple(sorted({row.op for row in rows})),
        tiers=tuple(sorted({row.mark.name for row in rows})),
        phases=tuple(sorted({row.phase for row in rows})),
        num_losses=sum(row.is_loss for row in rows),
    )


def _table_row(index: int, row: Row, whole_us: float | None, loser: int | None) -> TableRow:
    has_time = row.time_us is not None
    part = row.time_us / whole_us if row.time_us is not None and whole_us else None
    rate = row.flops / row.time_us * 1e6 if row.time_us and row.flops else None
    return TableRow(
        index=index,
        place=place_of(row),
        op=row.op,
        phase=row.phase,
        tokens=tokens_text(row.tokens),
        arguments=row.arguments,
        implementation=row.implementation,
        mark=row_mark(row),
        tier=row.tier,
        state=STATE_TEXTS[row.state],
        calls=count(row.calls),
        time=duration(row.time_us) if has_time else "",
        share=share(part) if part is not None else "",
        achieved=share(row.achieved) if row.achieved is not None else "",
        bar=min(100.0, 100 * (row.achieved or 0.0)),
        bound_by=row.bound_by or "",
        rate=quantity(rate, "").strip() if rate else "",
        leaf=LEAF_TEXTS[row.leaf.state],
        is_leaf_bad=row.leaf.state == "other",
        num_losers=len(row.losers),
        loser=loser,
        is_loss=is_loss(row),
    )
