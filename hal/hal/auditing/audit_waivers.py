"""Waivers in an audit: which findings they allow, and what became of each: used, unused, expired,
over-broad. None is hidden, and none that is expired or over-broad allows anything.

A waiver's kind names the class of findings: "tier" is lost-fast-path, the others have the class's
own name. Its component is matched with a finding's call site, its file, `file:line` or
`file:function`; its op with the finding's op, its device with the machine's id, arch or name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from hal.auditing.document import AuditReport, Finding, Location, Row, WaiverUse
from hal.auditing.gates import GateClass
from hal.auditing.summary import op_label
from hal.waivers import (
    Waiver,
    WaiverBook,
    parse_waiver_tables,
    problem_alone,
    read_waiver_text,
)

State = Literal["used", "unused", "expired", "over-broad"]
_GATES: Final = {"tier": GateClass.LOST_FAST_PATH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditWaivers:
    """The waivers of a file as an audit takes them. states: of each before it is used: "unused"
    for one that may count."""

    waivers: tuple[Waiver, ...] = ()
    states: tuple[State, ...] = ()
    source: str = "waivers"

    def planning_book(self) -> WaiverBook:
        """Those that may count, for a plan: it does not fail for one that is unused."""
        counting = [
            w for w, state in zip(self.waivers, self.states, strict=True) if not _bad(state)
        ]
        return WaiverBook(counting, self.source, is_lenient=True)

    def applied_to(self, report: AuditReport) -> AuditReport:
        """The report with `waiver` set on the findings that one allows, and `waivers` filled.

        What a plan's waiver allowed already counts as its use, unless it turns out over-broad.
        """
        findings = list(report.findings)
        uses = []
        for waiver, alone in zip(self.waivers, self.states, strict=True):
            text = waiver.describe()
            covered = [
                index
                for index, finding in enumerate(findings)
                if finding.waiver == text
                or (finding.waiver is None and _covers(waiver, finding, report))
            ]
            state = _state(waiver, alone, covered, report)
            for index in covered:
                allowed = None if _bad(state) else text
                findings[index] = findings[index].model_copy(update={"waiver": allowed})
            calls = sum(findings[index].calls for index in covered)
            uses.append(WaiverUse(text=text, state=state, calls=calls))
        earlier = [use for use in report.waivers if use.text not in {new.text for new in uses}]
        return report.model_copy(update={"findings": tuple(findings), "waivers": (*earlier, *uses)})


def read_audit_waivers(
    path: Path | str | None, *, today: datetime.date | None = None
) -> AuditWaivers:
    """The waivers of a file; none without one.

    Raises:
        WaiverError: missing, malformed, or an op that there is not. Not for expiry or breadth,
            which the report shows.
    """
    if path is None:
        return AuditWaivers()
    source, text = read_waiver_text(path)
    return audit_waivers(parse_waiver_tables(text, source), source, today=today)


def audit_waivers(
    waivers: Sequence[Waiver], source: str = "waivers", *, today: datetime.date | None = None
) -> AuditWaivers:
    """The same for waivers that were read already."""
    date = datetime.date.today() if today is None else today
    return AuditWaivers(
        waivers=tuple(waivers),
        states=tuple(_state_alone(waiver, date) for waiver in waivers),
        source=source,
    )


def _state_alone(waiver: Waiver, today: datetime.date) -> State:
    if waiver.expires < today:
        return "expired"
    return "over-broad" if problem_alone(waiver, "", today) is not None else "unused"


def _bad(state: State) -> bool:
    return state in ("expired", "over-broad")


def gate_of(waiver: Waiver) -> GateClass:
    """The class of findings that it may allow."""
    return _GATES.get(waiver.kind) or GateClass(waiver.kind)


def _covers(waiver: Waiver, finding: Finding, report: AuditReport) -> bool:
    return (
        finding.gate is gate_of(waiver)
        and _covers_machine(waiver, report)
        and _matches(finding.op, waiver.op)
        and _covers_place(waiver, finding.site, finding.location)
    )


def _covers_machine(waiver: Waiver, report: AuditReport) -> bool:
    machine = report.machine
    names = (machine.device_id, machine.arch, machine.label)
    return any(fnmatchcase(name, waiver.device) for name in names if name)


def _covers_place(waiver: Waiver, site: str, location: Location | None) -> bool:
    return any(fnmatchcase(name, waiver.component) for name in _place_names(site, location))


def _place_names(site: str, location: Location | None) -> Iterable[str]:
    if site or location is None:
        yield site
    if location is not None:
        yield from (location.file, str(location), f"{location.file}:{location.function}")


def _matches(op: str, pattern: str) -> bool:
    """The op as it is, or of a phase without it: "attention" is of "attention.decode" as well."""
    return fnmatchcase(op, pattern) or fnmatchcase(op.partition(".")[0], pattern)


def _state(waiver: Waiver, alone: State, covered: Sequence[int], report: AuditReport) -> State:
    """What became of it: of a file's own rows it may cover no larger share than it says."""
    if _bad(alone):
        return alone
    if not covered:
        return "unused"
    return "over-broad" if _share(waiver, report) > waiver.max_call_share else "used"


def _share(waiver: Waiver, report: AuditReport) -> float:
    """The share of all places, of rows and of findings, within its globs."""
    places: dict[tuple[str, str, str], bool] = {}
    items: list[Row | Finding] = [*report.rows, *report.findings]
    for item in items:
        op = op_label(item) if isinstance(item, Row) else item.op
        is_within = _matches(op, waiver.op) and _covers_place(waiver, item.site, item.location)
        key = (op, item.site, str(item.location or ""))
        places[key] = places.get(key, False) or is_within
    return sum(places.values()) / len(places) if places else 0.0
