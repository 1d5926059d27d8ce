"""`hal audit show REPORT`: a stored report again, as tables or as another kind of file."""

from __future__ import annotations

from pathlib import Path

from hal.auditing.gate import NO_GATE, AuditOutputs, finish_audit, parse_fail_on
from hal.auditing.report_files import read_report


def show_report(path: Path, outputs: AuditOutputs, fail_on: str | None = None) -> int:
    """Prints the report in `path`, writes its files, returns the exit code; no gate by default.

    Raises:
        DocumentError: the report cannot be read. UsageError: an unfit `fail_on`.
    """
    classes = parse_fail_on(fail_on, NO_GATE)
    return finish_audit(read_report(path), outputs, classes)
