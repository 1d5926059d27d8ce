"""The gate: which findings fail an audit, with which exit code, and where its report goes.

Exit codes: 0 nothing failed; 1 the gate failed; 2 the user's mistake; 130 interrupted. A program
that failed keeps its own code. Findings that a waiver allows fail nothing; what is advice never
does. A report of nothing (`nothing-observed`) fails a gate of any class.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from hal.auditing.document import AuditReport, Finding
from hal.auditing.gates import GATE_CLASSES, GateClass
from hal.auditing.report_files import check_writable, read_report, write_report_file
from hal.auditing.unobserved import NOTHING_OBSERVED, with_unobserved
from hal.errors import DocumentError, UsageError
from hal.suggestions import did_you_mean
from hal.visible_text import visible_json

NO_GATE: Final = "none"
MODEL_FAIL_ON: Final = "lost-fast-path,unrouted,semantic,leaf-mismatch"
"""Default of `hal audit MODEL`."""
PROGRAM_FAIL_ON: Final = NO_GATE
"""Default of `hal audit run`: a report only."""
STANDARD_OUTPUT: Final = Path("-")
_STREAMED = ("json", "markdown")


class ExitCode(IntEnum):
    """What a command of audits, locks and diffs ends with."""

    FINE = 0
    GATE_FAILED = 1
    USER_ERROR = 2
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOutputs:
    """Where a report goes, besides the tables on the terminal. "-" is standard output, for one of
    json and markdown; the tables are left out then. previous: an older report, of which the
    Markdown and the page say what changed since."""

    json: Path | None = None
    junit: Path | None = None
    sarif: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    previous: AuditReport | None = None

    def files(self) -> dict[str, Path]:
        """Option without dashes -> path, of those that were given."""
        kinds = (field.name for field in dataclasses.fields(self) if field.name != "previous")
        paths = ((kind, getattr(self, kind)) for kind in kinds)
        return {kind: path for kind, path in paths if path is not None}

    @property
    def streamed(self) -> str:
        """The kind that goes to standard output, "" if none does."""
        return next((k for k, path in self.files().items() if path == STANDARD_OUTPUT), "")


def parse_fail_on(text: str | None, default: str = MODEL_FAIL_ON) -> frozenset[GateClass]:
    """The classes of `--fail-on`, comma separated; "none" alone is no gate at all.

    Raises:
        UsageError: an unknown or empty word, "none" beside others.
    """
    words = [word.strip() for word in (default if text is None else text).split(",")]
    if words == [NO_GATE]:
        return frozenset()
    for word in words:
        if word not in GATE_CLASSES:
            raise _unfit_word(word, len(words))
    return frozenset(GateClass(word) for word in words)


def _unfit_word(word: str, num_words: int) -> UsageError:
    required = f"classes of findings, comma separated: {', '.join(GATE_CLASSES)}; or {NO_GATE}"
    if word == NO_GATE:
        found, remedy = f"{NO_GATE} beside {num_words - 1} others", f"write {NO_GATE} alone"
    elif word == GateClass.ADVICE:
        found, remedy = f"{word}, which never fails a gate", "leave it out"
    elif not word:
        found, remedy = "an empty word", f"name classes, or {NO_GATE}"
    else:
        found = f"the unknown word {word!r}"
        remedy = did_you_mean(word, (*GATE_CLASSES, NO_GATE))
    return UsageError("option --fail-on", required, found, remedy)


def create_outputs(
    *,
    json: Path | None = None,
    junit: Path | None = None,
    sarif: Path | None = None,
    markdown: Path | None = None,
    html: Path | None = None,
    previous: Path | None = None,
) -> AuditOutputs:
    """The outputs, checked before anything runs for minutes.

    Raises:
        UsageError: two outputs in one place, or "-" where a file is needed.
        DocumentError: a path that cannot be written, a previous report that cannot be read.
    """
    outputs = AuditOutputs(
        json=json,
        junit=junit,
        sarif=sarif,
        markdown=markdown,
        html=html,
        previous=None if previous is None else read_report(previous),
    )
    owners: dict[Path, str] = {}
    for kind, path in outputs.files().items():
        is_streamed = path == STANDARD_OUTPUT
        if is_streamed and kind not in _STREAMED:
            raise UsageError(
                f"option --{kind}", "a file", '"-"', "name a file; - is for --json and --markdown"
            )
        place = path if is_streamed else path.absolute()
        if place in owners:
            found = f"{path} for both --{owners[place]} and --{kind}"
            raise UsageError("outputs of an audit", "a place each", found, "name another file")
        owners[place] = kind
        if not is_streamed:
            check_writable(path, f"option --{kind}")
    return outputs


def fails_gate(finding: Finding, fail_on: Iterable[GateClass]) -> bool:
    """Whether a finding fails a gate of these classes."""
    classes = frozenset(fail_on) - {GateClass.ADVICE}
    if finding.waiver is not None or not classes:
        return False
    return finding.gate in classes or finding.rule == NOTHING_OBSERVED


def gated_findings(report: AuditReport, fail_on: Iterable[GateClass]) -> list[Finding]:
    """The findings that fail the gate, worst first; of a report of nothing that it is one."""
    classes = frozenset(fail_on)
    waiting = with_unobserved(report).open_findings()
    return [finding for finding in waiting if fails_gate(finding, classes)]


def exit_code(
    report: AuditReport, fail_on: Iterable[GateClass], program_code: int = ExitCode.FINE
) -> int:
    """What the command ends with. program_code: of the audited program; its own failure counts
    before the gate's."""
    if program_code != ExitCode.FINE:
        return program_code
    return ExitCode.GATE_FAILED if gated_findings(report, fail_on) else ExitCode.FINE


def finish_audit(
    report: AuditReport,
    outputs: AuditOutputs,
    fail_on: frozenset[GateClass] = frozenset(),
    program_code: int = ExitCode.FINE,
) -> int:
    """Prints the report, writes its files, and returns the exit code, see `exit_code`.

    Raises:
        ExceptionGroup: of DocumentError, for files that could not be written; the others are.
    """
    from hal.auditing.terminal import print_report

    report = with_unobserved(report)
    streamed = outputs.streamed
    if streamed:
        sys.stdout.write(_render(streamed, report, outputs, fail_on))
        sys.stdout.flush()
    else:
        print_report(report, fail_on)
    failures = []
    for kind, path in outputs.files().items():
        if path == STANDARD_OUTPUT:
            continue
        try:
            write_report_file(path, _render(kind, report, outputs, fail_on), who=f"option --{kind}")
        except DocumentError as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup("files of the report that could not be written", failures)
    return int(exit_code(report, fail_on, program_code))


def _render(
    kind: str, report: AuditReport, outputs: AuditOutputs, fail_on: frozenset[GateClass]
) -> str:
    """The report as the text of one kind of file; imported here, so that a gate costs nothing."""
    if kind == "json":
        return visible_json(report.to_json()) + "\n"
    if kind == "junit":
        from hal.auditing.junit import render_junit

        return render_junit(report, fail_on)
    if kind == "sarif":
        from hal.auditing.sarif import render_sarif

        return render_sarif(report, fail_on)
    if kind == "markdown":
        from hal.auditing.markdown import render_markdown

        return render_markdown(report, fail_on, outputs.previous)
    from hal.auditing.html import render_html

    return render_html(report, outputs.previous)
