"""A report as JUnit XML: a test case for each row and each finding, failures for what is gated.

The dialect is that of Jenkins' junit-10.xsd, which pytest and GitLab share: `testsuites`, a
`testsuite` for each gate class and one for the rows, `testcase` with `failure` or `skipped`,
`system-out` for the evidence. Places are in the names: the schema has no file and line of a case.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hal.auditing.document import AuditReport, Finding, Row
from hal.auditing.finding_text import evidence_text, finding_cost
from hal.auditing.gate import fails_gate
from hal.auditing.gates import GateClass
from hal.auditing.summary import op_label
from hal.auditing.xml_text import legal_text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A test case. time_s: observed. failure, skipped: message and text, of which one at most."""

    name: str
    classname: str
    time_s: float = 0.0
    failure: tuple[str, str, str] | None = None  # message, type, text
    skipped: str = ""
    output: str = ""


_Cases = list[tuple[str, _Case]]  # with the name that no other case of the suite has


def render_junit(report: AuditReport, fail_on: frozenset[GateClass]) -> str:
    """The report in JUnit XML. What XML cannot write becomes escapes."""
    suites: list[tuple[str, _Cases]] = [
        ("rows", _distinct([_row_case(row) for row in report.rows]))
    ]
    for gate in GateClass:
        cases = [_finding_case(f, fail_on) for f in report.findings if f.gate is gate]
        if cases:
            suites.append((gate.value, _distinct(cases)))
    root = ElementTree.Element("testsuites", name=legal_text(f"hal audit {report.subject}"))
    everything = [pair for _, named in suites for pair in named]
    _count(root, everything)
    for name, named in suites:
        suite = ElementTree.SubElement(root, "testsuite", name=name)
        _count(suite, named)
        suite.set("skipped", str(sum(bool(case.skipped) for _, case in named)))
        suite.set("timestamp", _timestamp(report.created))
        _add_properties(suite, report)
        for pair in named:
            _add_case(suite, pair)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _row_case(row: Row) -> _Case:
    place = row.site or ("" if row.location is None else str(row.location)) or "anywhere"
    tokens = "" if row.tokens is None else f" tokens {row.tokens[0]}–{row.tokens[1]}"
    arguments = f" [{row.arguments}]" if row.arguments else ""
    return _Case(
        name=f"{place}{tokens}: {row.implementation}{arguments}",
        classname=f"rows.{op_label(row)}",
        time_s=(row.time_us or 0.0) / 1e6,
        skipped="planned, never exercised" if row.state == "never-exercised" else "",
    )


def _finding_case(finding: Finding, fail_on: frozenset[GateClass]) -> _Case:
    facts = [evidence_text(fact) for fact in finding.evidence]
    text = "\n".join([*facts, *finding_cost(finding), f"remedy: {finding.remedy}"])
    is_failure = fails_gate(finding, fail_on)
    is_gate = finding.gate is not GateClass.ADVICE
    skipped = ""
    if finding.waiver is not None:
        skipped = f"waived: {finding.waiver}"
    elif not is_failure and is_gate:
        skipped = f"not gated: {finding.title}"
    return _Case(
        name=f"{finding.rule} at {finding.where or finding.op or 'the program'}",
        classname=f"{finding.gate}.{finding.rule}",
        time_s=(finding.time_us or 0.0) / 1e6,
        failure=(finding.title, finding.gate.value, text) if is_failure else None,
        skipped=skipped,
        output="" if is_failure else f"{finding.title}\n{text}",
    )


def _distinct(cases: Sequence[_Case]) -> _Cases:
    """Names that no other case of the suite has: servers join cases by them."""
    seen: Counter[tuple[str, str]] = Counter()
    named = []
    for case in cases:
        seen[case.classname, case.name] += 1
        number = seen[case.classname, case.name]
        named.append((case.name if number == 1 else f"{case.name} ({number})", case))
    return named


def _count(element: ElementTree.Element, cases: Sequence[tuple[str, _Case]]) -> None:
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.failure is not None for _, case in cases)))
    element.set("errors", "0")
    # The schema takes no more than milliseconds for suites.
    element.set("time", f"{sum(case.time_s for _, case in cases):.3f}")


def _timestamp(created: str) -> str:
    """ISO 8601 without a zone, which is all that the common schema takes."""
    return legal_text(created[:19])


def _add_properties(suite: ElementTree.Element, report: AuditReport) -> None:
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "device": report.machine.label,
        "mode": report.mode,
        "plan": report.plan_hash or "",
        **{f"version.{name}": version for name, version in report.versions.items()},
    }
    for name, value in facts.items():
        ElementTree.SubElement(
            properties, "property", name=legal_text(name), value=legal_text(value)
        )


def _add_case(suite: ElementTree.Element, named: tuple[str, _Case]) -> None:
    name, case = named
    element = ElementTree.SubElement(
        suite,
        "testcase",
        name=legal_text(name),
        classname=legal_text(case.classname),
        time=f"{case.time_s:.6f}",
    )
    if case.failure is not None:
        message, kind, text = (legal_text(part) for part in case.failure)
        ElementTree.SubElement(element, "failure", message=message, type=kind).text = text
    elif case.skipped:
        ElementTree.SubElement(element, "skipped", message=legal_text(case.skipped))
    if case.output:
        ElementTree.SubElement(element, "system-out").text = legal_text(case.output)
