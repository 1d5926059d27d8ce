"""The sheet of one entry: its facts in parts, notes below the table, links as a matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hal.cli.output import print_text
from hal_capability_db.cli.tables import Column, Heading, Row, print_rows
from hal_capability_db.database import Database
from hal_capability_db.facts import Entity, entry_facts
from hal_capability_db.loader import BUILT_IN
from hal_capability_db.profiles import FamilyProfile, LinkMeasurement
from hal_capability_db.quantities import fact_text, value_text
from hal_capability_db.values import Fact

_FACT_COLUMNS = (
    Column("what"),
    Column("value"),
    Column("confidence", is_fixed=True),
    Column("source"),
)


def print_sheet(database: Database, entry: Entity) -> None:
    """Everything about an entry, then the sources that it cites."""
    facts = entry_facts(entry)
    print_text(_title(entry, facts))
    if isinstance(entry, FamilyProfile):
        _print_family(facts)
    else:
        _print_facts(facts)
    links = [link for link in database.links if link.device == entry.id]
    for part in _link_parts(links):
        _print_links(part)
    cited = {source for fact in facts.values() for source in fact.source}
    cited |= {source for link in links for source in link.value.source}
    columns = (Column("source", is_fixed=True), Column("what it is"))
    print_rows(columns, [(name, database.sources[name]) for name in sorted(cited)])


def _title(entry: Entity, facts: Mapping[str, Fact[Any]]) -> str:
    kind = type(entry).__name__.removesuffix("Profile").lower()
    lines = [f"{entry.name} — {kind} {entry.id}"]
    if entry.origin != BUILT_IN:
        lines[0] += f", from {entry.origin}"
    plain = {key: fact for key, fact in facts.items() if not fact.source and key != "name"}
    short = [f"{_label(key)} {fact_text(fact)}" for key, fact in plain.items() if key != "notes"]
    lines += [", ".join(short)] if short else []
    lines += [fact_text(plain["notes"])] if "notes" in plain else []
    return "\n".join(lines)


def _print_facts(facts: Mapping[str, Fact[Any]]) -> None:
    notes: dict[str, int] = {}
    rows: list[Row] = []
    part = ""
    for key, fact in facts.items():
        if not fact.source:
            continue
        head, _, rest = key.partition(".")
        if rest and head != part:
            rows.append(Heading(_label(head)))
        part = head if rest else ""
        label = f"  {_label(rest)}" if rest else _label(key)
        rows.append((label, _noted(fact, notes), fact.confidence, ", ".join(fact.source)))
    print_rows(_FACT_COLUMNS, rows)
    for note, number in notes.items():
        print_text(f"[{number}] {note}")


def _noted(fact: Fact[Any], notes: dict[str, int]) -> str:
    """The value, with the number of its note."""
    text = fact_text(fact)
    if not fact.note:
        return text
    number = notes.setdefault(fact.note, len(notes) + 1)
    return f"{text} [{number}]"


def _print_family(facts: Mapping[str, Fact[Any]]) -> None:
    rows: list[Row] = []
    part = ""
    for key, fact in facts.items():
        if not fact.source:
            continue
        head, _, rest = key.partition(".")
        if head != part:
            part = head
            sources = ", ".join(fact.source)
            rows += [("", "")] if rows else []
            rows.append(Heading(head))
            rows.append((f"  {fact.confidence}", sources))
            if fact.note:
                rows.append(("  note", fact.note))
        rows.append((f"  {_label(rest)}", _lines(fact.value)))
    print_rows((Column("what"), Column("value")), rows)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, tuple) else value_text(value)


def _link_parts(links: Sequence[LinkMeasurement]) -> Iterable[list[LinkMeasurement]]:
    """The points that one table shows: same metric, implementation and source."""
    parts: dict[tuple[str, str, tuple[str, ...]], list[LinkMeasurement]] = {}
    for link in links:
        key = link.metric, link.implementation, link.value.source
        parts.setdefault(key, []).append(link)
    return parts.values()


def _print_links(links: Sequence[LinkMeasurement]) -> None:
    first = links[0]
    worlds = sorted({link.world_size for link in links})
    sizes = {link.message_bytes for link in links}
    by_point = {(link.message_bytes, link.world_size): link.value for link in links}
    rows = [
        (
            "any" if size is None else value_text(size, "B"),
            *(_point(by_point.get((size, world))) for world in worlds),
        )
        for size in sorted(sizes, key=lambda size: size or 0)
    ]
    title = f"{first.metric.replace('_', ' ')} by {first.implementation}"
    sources = ", ".join(first.value.source)
    print_text(f"{title} ({first.value.confidence}: {sources})")
    if first.value.note:
        print_text(first.value.note)
    columns = [Column("message", is_number=True)]
    columns += [Column(f"{world} devices", is_number=True) for world in worlds]
    print_rows(columns, rows)


def _point(fact: Fact[float] | None) -> str:
    return "" if fact is None else fact_text(fact)


def _label(key: str) -> str:
    if key.startswith("environment."):
        return key.removeprefix("environment.")
    for unit in ("_bytes_per_s", "_bytes"):
        if key.endswith(unit):
            bandwidth = " bandwidth" if unit == "_bytes_per_s" else ""
            key = key.removesuffix(unit) + bandwidth
    return key.replace("_", " ").replace(".", " ")
