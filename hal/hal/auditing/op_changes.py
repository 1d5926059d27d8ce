"""What it means that a call site has another decision: other numbers, faster, slower, renamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hal.auditing.changes import Change, ChangeKind, value_text
from hal.auditing.plan_documents import PlanOpDocument
from hal.auditing.quantities import format_time
from hal.reasons import RANKING_KINDS

SAME_WITHIN: Final = 0.02
"""Estimates that differ by less are equal: they come from rounded measurements."""
# Arguments that decide in which numbers is computed.
_NUMERIC: Final = ("dtype", "format", "scale", "softcap", "causal", "window", "epsilon", "eps")

SameSource = frozenset[tuple[str, str]]
"""Pairs of an old and a new candidate that come from equal source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is known beside the two plans. same_source: None where nobody knows sources."""

    same_source: SameSource | None = None
    is_other_device: bool = False


def op_changes(
    site: str, old: PlanOpDocument, new: PlanOpDocument, comparison: Comparison
) -> Iterator[Change]:
    """Every change between two decisions for the same call site and numbers of tokens."""
    where = (site,)
    yield from _argument_changes(where, old, new)
    yield from _note_changes(where, old, new)
    if old.waiver != new.waiver:
        yield Change(
            kind=ChangeKind.SETTING,
            what=f"waiver of {new.label}",
            old=old.waiver or "none",
            new=new.waiver or "none",
            where=where,
        )
    speed = _speed_change(where, old, new, comparison)
    if speed is not None:
        yield speed
    elif _reasons(old) != _reasons(new):
        names = sorted(
            {name for name, _ in _reasons(old) ^ _reasons(new)} - {old.choice, new.choice}
        )
        yield Change(
            kind=ChangeKind.REASONS,
            what=new.label,
            old=_lost(old),
            new=_lost(new),
            where=where,
            detail=f"why {', '.join(names[:6]) or 'others'} did not serve",
        )


def _argument_changes(
    where: tuple[str, ...], old: PlanOpDocument, new: PlanOpDocument
) -> Iterator[Change]:
    for key in sorted({*old.arguments, *new.arguments}):
        if old.arguments.get(key) == new.arguments.get(key):
            continue
        is_numeric = any(part in key for part in _NUMERIC)
        yield Change(
            kind=ChangeKind.SEMANTICS if is_numeric else ChangeKind.MODEL,
            what=f"{new.label} {key}",
            old=value_text(old.arguments, key),
            new=value_text(new.arguments, key),
            where=where,
            detail="computes in other numbers" if is_numeric else "is another call",
        )


def _note_changes(
    where: tuple[str, ...], old: PlanOpDocument, new: PlanOpDocument
) -> Iterator[Change]:
    before = {note.name: note.text for note in old.semantic_notes}
    after = {note.name: note.text for note in new.semantic_notes}
    for name in sorted({*before} ^ {*after}):
        yield Change(
            kind=ChangeKind.SEMANTICS,
            what=f"{new.label} {name}",
            old="yes" if name in before else "no",
            new="yes" if name in after else "no",
            where=where,
            detail=after.get(name, before.get(name, "")),
        )


def _speed_change(
    where: tuple[str, ...],
    old: PlanOpDocument,
    new: PlanOpDocument,
    comparison: Comparison,
) -> Change | None:
    kind, detail = _judged(old, new, comparison)
    if kind is None:
        return None
    return Change(
        kind=kind,
        what=new.label,
        old=f"{old.choice} ({old.tier})",
        new=f"{new.choice} ({new.tier})",
        where=where,
        detail=detail,
    )


def _judged(
    old: PlanOpDocument, new: PlanOpDocument, comparison: Comparison
) -> tuple[ChangeKind | None, str]:
    """The kind of the change of implementation, if it is one, and why."""
    is_same = old.choice == new.choice
    if old.rank is not new.rank:
        kind = ChangeKind.FASTER if new.rank > old.rank else ChangeKind.SLOWER
        return kind, f"tier {old.tier} → {new.tier}"
    if not is_same and _is_renamed(old, new, comparison.same_source):
        return ChangeKind.RENAMED, "the same code by another name"
    for what, before, after in (
        ("estimate", old.estimate_us, new.estimate_us),
        ("roofline", old.roofline_us, new.roofline_us),
    ):
        if before is None or after is None or before <= 0:
            continue
        if what == "roofline" and is_same and not comparison.is_other_device:
            continue  # another rate was measured; what runs is the same
        detail = f"{what} {format_time(before)} → {format_time(after)} a call"
        if abs(after - before) > SAME_WITHIN * before:
            return (ChangeKind.FASTER if after < before else ChangeKind.SLOWER), detail
    if is_same:
        return None, ""
    return ChangeKind.IMPLEMENTATION, "the same tier, and no estimate tells them apart"


def _is_renamed(old: PlanOpDocument, new: PlanOpDocument, same_source: SameSource | None) -> bool:
    """Same tier, leaf, estimate and distribution; in locks the same source as well."""
    if same_source is not None and (old.choice, new.choice) not in same_source:
        return False
    return (
        bool(old.leaf)
        and old.leaf == new.leaf
        and old.estimate_us == new.estimate_us
        and old.distribution == new.distribution
    )


def _reasons(op: PlanOpDocument) -> set[tuple[str, str]]:
    """(loser, its reasons) but for those that only say how it was ranked."""
    return {
        (
            loser.name,
            "; ".join(
                f"{reason.get('what')}: {reason.get('required')}, {reason.get('found')}"
                for reason in loser.reasons
                if str(reason.get("kind")) not in RANKING_KINDS
            ),
        )
        for loser in op.rejected
    }


def _lost(op: PlanOpDocument) -> str:
    lost: Mapping[str, Any] = op.lost or {}
    return f"loses {lost['better']}" if "better" in lost else ""
