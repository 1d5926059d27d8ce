"""Refusals in a report: each error of ours that was raised while the audit ran, and a finding for
each that the program swallowed, which is how a component is swapped without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hal.auditing.document import Evidence, Finding, Location, Refusal
from hal.auditing.gates import GateClass, Severity
from hal.refusal_log import REFUSALS, RecordedRefusal, RefusalSite

SWALLOWED_RULE: Final = "swallowed-refusal"
_REMEDY = (
    "let the error pass, or allow the fallback by a waiver: an `except` around halstack hides "
    "that another component runs"
)


def mark_refusals() -> int:
    """The beginning of an audit, for `refusals_since`."""
    return REFUSALS.mark()


def refusals_since(
    mark: int, *, ending: BaseException | None = None, folder: Path | None = None
) -> tuple[Refusal, ...]:
    """What halstack refused since then, in order; equal refusals from one place as one.

    ending: the error that the program is just ending by, if it does: that one was not swallowed.
    folder: what paths are relative to, the working directory by default.
    """
    base = Path.cwd() if folder is None else folder
    return tuple(_refusal(found, base) for found in REFUSALS.refusals(since=mark, ending=ending))


def _refusal(found: RecordedRefusal, folder: Path) -> Refusal:
    return Refusal(
        who=found.who,
        required=found.required,
        found=found.found,
        remedy=found.remedy,
        location=None if found.site is None else _location(found.site, folder),
        is_swallowed=found.is_swallowed,
    )


def _location(site: RefusalSite, folder: Path) -> Location:
    path = Path(site.file)
    if path.is_absolute() and path.is_relative_to(folder):
        path = path.relative_to(folder)
    return Location(file=str(path), line=site.line, function=site.function)


def refusal_findings(refusals: Iterable[Refusal]) -> list[Finding]:
    """A lost fast path for each refusal that the program swallowed."""
    return [
        Finding(
            rule=SWALLOWED_RULE,
            gate=GateClass.LOST_FAST_PATH,
            severity=Severity.ERROR,
            title=f"the program went on after a refusal of {refusal.who}",
            location=refusal.location,
            evidence=(Evidence(what=refusal.who, required=refusal.required, found=refusal.found),),
            remedy=f"{refusal.remedy}; or {_REMEDY}" if refusal.remedy else _REMEDY,
        )
        for refusal in refusals
        if refusal.is_swallowed
    ]
