"""Completes a report with what lies around the observed: variables, refusals, waivers, and the
findings that follow from them. Both kinds of audit end with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from pydantic_core import PydanticSerializationError

from hal.auditing.audit_waivers import AuditWaivers
from hal.auditing.document import AuditReport, Finding, Refusal
from hal.auditing.foreign_variables import SLOW_RULE, foreign_variables, variable_findings
from hal.auditing.refusals import SWALLOWED_RULE, refusal_findings
from hal.auditing.unobserved import with_unobserved


def complete_report(
    report: AuditReport,
    *,
    device_type: str = "",
    environment: Mapping[str, str] | None = None,
    refusals: Iterable[Refusal] = (),
    waivers: AuditWaivers | None = None,
) -> AuditReport:
    """The report with all of it; what it has already is kept and not told twice.

    device_type: torch's type of the audited device: variables of others are left out. environment:
    of this process by default.
    """
    variables = report.variables or foreign_variables(environment, device_type=device_type)
    known = tuple(dict.fromkeys((*report.refusals, *refusals)))
    rules = {finding.rule for finding in report.findings}
    further: list[Finding] = []
    if SLOW_RULE not in rules:
        further += variable_findings(variables)
    if SWALLOWED_RULE not in rules:
        further += refusal_findings(known)
    completed = report.model_copy(
        update={
            "variables": variables,
            "refusals": known,
            "findings": (*report.findings, *further),
        }
    )
    completed = with_unobserved(_storable(completed))
    return completed if waivers is None else waivers.applied_to(completed)


def _storable(report: AuditReport) -> AuditReport:
    """The report with halves of surrogate pairs as their escapes: names of files and variables that
    are no UTF-8 have some, and no file can hold them."""
    try:
        report.to_json()
    except PydanticSerializationError:
        document = _escaped(report.model_dump(by_alias=True))
        return AuditReport.model_validate(document)
    return report


def _escaped(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Enum):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_escaped(item) for item in value)
    return value
