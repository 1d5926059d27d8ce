"""Whether an audit saw anything at all: one that did not has proven nothing, and no gate passes it.

The finding is of class `unverified`, and it fails a gate of any class (`fails_gate`): that no lost
path was seen says nothing where no path was.
"""

from __future__ import annotations

from typing import Final

from hal.auditing.document import AuditReport, Evidence, Finding
from hal.auditing.gates import GateClass, Severity

NOTHING_OBSERVED: Final = "nothing-observed"
"""Id of the rule."""
_REMEDIES: Final = {
    "program": "audit the command that runs the model, with the input that makes it run; what runs "
    "in a process that is not a child of it, or without this torch, is not seen",
    "model": "give prompts that reach the model (--prompts), or leave them out for a load of all "
    "planned sizes",
}


def is_observed(report: AuditReport) -> bool:
    """Whether a single call was seen or counted."""
    return any(row.calls for row in report.rows) or any(
        work.calls for work in report.coverage.values()
    )


def with_unobserved(report: AuditReport) -> AuditReport:
    """The report, with a finding if nothing was observed and it does not say so yet."""
    if is_observed(report) or any(f.rule == NOTHING_OBSERVED for f in report.findings):
        return report
    finding = Finding(
        rule=NOTHING_OBSERVED,
        gate=GateClass.UNVERIFIED,
        severity=Severity.WARNING,
        title="nothing was observed: no call of torch or of a planned op ran under the audit",
        evidence=(Evidence(what="calls observed", required="at least one", found="none"),),
        remedy=_REMEDIES[report.kind],
    )
    return report.model_copy(update={"findings": (*report.findings, finding)})
