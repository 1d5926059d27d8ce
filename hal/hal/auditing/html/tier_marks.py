"""How the page marks a tier: a class for colour and pattern, a letter, the shape of a point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hal.auditing.document import Row


@dataclass(frozen=True, slots=True)
class TierMark:
    """name: class and word. letter: in a small cell. rank: 0 is the worst to have."""

    name: str
    letter: str
    meaning: str
    rank: int


TIER_MARKS: Final = (
    TierMark("native", "N", "the device's own instructions for that dtype, tuned", 6),
    TierMark("tuned", "T", "measured and tuned, not the best unit", 5),
    TierMark("portable", "P", "right, slower", 3),
    TierMark("reference", "R", "plain torch", 2),
    TierMark("host", "H", "host ops and copies within a step", 1),
    TierMark("outside", "O", "outside every bound op", 0),
    TierMark("unknown", "?", "nobody says which tier it is", 4),
    TierMark("never", "–", "planned, and nothing called it", 7),
)
MARK_OF: Final = {mark.name: mark for mark in TIER_MARKS}


def mark_name(tier: str) -> str:
    """The mark of a tier's word; a word that is not known is unknown."""
    return tier if tier in MARK_OF and tier != "never" else "unknown"


def row_mark(row: Row) -> TierMark:
    """The mark of a row: what never ran has no tier to show, what nobody planned is outside."""
    if row.state == "never-exercised":
        return MARK_OF["never"]
    if row.state == "not-planned" and mark_name(row.tier) == "unknown":
        return MARK_OF["outside"]
    return MARK_OF[mark_name(row.tier)]


def is_loss(row: Row) -> bool:
    """Whether something is lost here: a better implementation did not run, another leaf did, or
    nobody planned it."""
    return bool(row.losers) or row.leaf.state == "other" or row.state == "not-planned"
