"""Better-ranked implementations that did not run, and leaves: each told once for all its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hal.auditing.document import AuditReport, Evidence, Row
from hal.auditing.html.places import group_place, layers_text
from hal.auditing.html.quantities import total
from hal.auditing.html.tier_marks import MARK_OF, TierMark, mark_name, row_mark


@dataclass(frozen=True, slots=True)
class LoserView:
    """One implementation that did not run. gain_us: over all rows of its group."""

    name: str
    mark: TierMark
    reasons: tuple[Evidence, ...]
    unlock: tuple[str, ...]
    gain_us: float | None


@dataclass(frozen=True, slots=True)
class LoserGroup:
    """Rows that one implementation served while the same better ones did not, for the same
    reasons. gain_us: the largest of the losers', since only one of them can serve."""

    number: int
    op: str
    places: tuple[str, ...]
    phases: tuple[str, ...]
    num_rows: int
    implementation: str
    mark: TierMark
    calls: int
    time_us: float | None
    gain_us: float | None
    losers: tuple[LoserView, ...]


@dataclass(frozen=True, slots=True)
class LoserList:
    """Groups, the largest gain first. group_of: for each row of the report, its group's number."""

    groups: tuple[LoserGroup, ...]
    group_of: list[int | None]


def loser_list(report: AuditReport) -> LoserList:
    """Gathers the losers of a report."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(report.rows):
        if row.losers:
            reasons = tuple((loser.name, loser.tier, loser.reasons) for loser in row.losers)
            found.setdefault((row.op, row.implementation, reasons), []).append(index)
    rows = report.rows
    gathered = [(_group([rows[index] for index in indices]), indices) for indices in found.values()]
    gathered.sort(key=lambda item: (-(item[0].gain_us or 0.0), -(item[0].time_us or 0.0)))
    group_of: list[int | None] = [None] * len(rows)
    groups = []
    for number, (group, indices) in enumerate(gathered, start=1):
        groups.append(replace(group, number=number))
        for index in indices:
            group_of[index] = number
    return LoserList(tuple(groups), group_of)


def _group(rows: Sequence[Row]) -> LoserGroup:
    first = rows[0]
    losers = tuple(
        LoserView(
            name=loser.name,
            mark=MARK_OF[mark_name(loser.tier)],
            reasons=loser.reasons,
            unlock=tuple(dict.fromkeys(step for row in rows for step in row.losers[at].unlock)),
            gain_us=total(row.losers[at].gain_us for row in rows),
        )
        for at, loser in enumerate(first.losers)
    )
    return LoserGroup(
        number=0,
        op=first.op,
        places=places_text(rows),
        phases=tuple(dict.fromkeys(row.phase for row in rows if row.phase != "any")),
        num_rows=len(rows),
        implementation=first.implementation,
        mark=row_mark(first),
        calls=sum(row.calls for row in rows),
        time_us=total(row.time_us for row in rows),
        gain_us=max((loser.gain_us for loser in losers if loser.gain_us is not None), default=None),
        losers=losers,
    )


def places_text(rows: Sequence[Row]) -> tuple[str, ...]:
    """`layers.*.qkv_proj (layers 0–29)` for each place of the rows, in order."""
    layers: dict[str, list[int]] = {}
    for row in rows:
        known = layers.setdefault(group_place(row), [])
        if row.layer is not None:
            known.append(row.layer)
    return tuple(
        f"{place} ({layers_text(found)})" if found else place for place, found in layers.items()
    )


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Rows of one implementation with one outcome. seen: leaf and count, most first."""

    implementation: str
    mark: TierMark
    op: str
    state: str
    num_rows: int
    declared: tuple[str, ...]
    seen: tuple[tuple[str, int], ...]
    proof: str


_LEAF_ORDER = ("other", "not-observed", "seen", "not-declared")


def leaf_groups(report: AuditReport) -> tuple[LeafGroup, ...]:
    """Leaf checks of rows that ran, those that failed first; empty where nothing is declared."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in report.rows:
        leaf = row.leaf
        if row.calls and (leaf.declared or leaf.seen or leaf.state != "not-declared"):
            key = (row.op, row.implementation, leaf.state, leaf.declared, leaf.proof)
            found.setdefault(key, []).append(row)
    groups = [_leaf_group(rows) for rows in found.values()]
    return tuple(sorted(groups, key=lambda group: _LEAF_ORDER.index(group.state)))


def _leaf_group(rows: Sequence[Row]) -> LeafGroup:
    first = rows[0]
    seen: Counter[str] = Counter()
    for row in rows:
        seen.update(dict(row.leaf.seen))
    return LeafGroup(
        implementation=first.implementation,
        mark=row_mark(first),
        op=first.op,
        state=first.leaf.state,
        num_rows=len(rows),
        declared=first.leaf.declared,
        seen=tuple(sorted(seen.items(), key=lambda item: (-item[1], item[0]))),
        proof=first.leaf.proof,
    )
