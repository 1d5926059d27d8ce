"""`hal.audit()`: the audit of a piece of any PyTorch program, and the report that it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hal.auditing.children import Children
from hal.auditing.gates import GateClass
from hal.auditing.session import Mode, Session
from hal.errors import AuditError
from hal.suggestions import did_you_mean

if TYPE_CHECKING:
    from hal.auditing.audit_waivers import AuditWaivers
    from hal.auditing.document import AuditReport, Finding
    from hal.auditing.trace import Trace
    from hal.device import DeviceSpec

_MAX_NAMED = 10


class audit:  # a context manager, named as it is used
    """Observes the PyTorch program within a `with` block, unchanged, and judges it at its end.

    After the block `result` is the report, `findings` its findings and `trace` what was observed.

    Args:
        mode: "full" sees every op and is slow; "light" observes whole steps now and then.
        fail_on: classes of findings that raise AuditError at the end of the block.
        device: what findings and rooflines judge by; by default only what is seen of tensors.
        subject: what the report calls the program.
        waivers: findings that are allowed, see `read_audit_waivers`.

    Raises:
        AuditError: another audit runs in this process, or the gate failed.
    """

    def __init__(
        self,
        mode: Mode = "full",
        fail_on: Iterable[str | GateClass] = (),
        device: DeviceSpec | None = None,
        subject: str = "a block of a program",
        waivers: AuditWaivers | None = None,
    ) -> None:
        if mode not in ("full", "light"):
            raise AuditError("hal.audit", 'mode "full" or "light"', repr(mode), "correct it")
        self.subject = subject
        self.describe_device: Callable[[Trace], DeviceSpec | None] = lambda trace: device
        self._fail_on = read_classes(fail_on)
        self._waivers = waivers
        self._session = Session(mode)
        self._notes: list[str] = []
        self._children = Children(mode)
        self._result: AuditReport | None = None
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)
        if error is None and self._fail_on and not self.is_fork:
            check_gate(self.result, self._fail_on)

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that began the audit: its trace goes there
        when it exits, and there is no report here."""
        return self._session.is_child

    def begin(self) -> None:
        """What `with` does first.

        Raises:
            AuditError: another audit runs in this process, or nothing can be written; this one
                has ended.
        """
        if self._trace is not None:
            raise AuditError(
                "hal.audit", "an audit for each block", "one that has ended", "create another"
            )
        self._session.start()
        try:
            self._children.open()
        except AuditError:
            self._session.stop()
            raise

    def note(self, text: str) -> None:
        """What else a reader of the report must know."""
        self._notes.append(text)

    def end(self, error: BaseException | None = None) -> None:
        """What the end of the block does. error: by which the program ends."""
        from hal.auditing.program_report import create_report

        if self.is_fork or self._trace is not None:
            return
        if error is not None:
            kind = type(error).__name__
            self.note(f"ended by {kind}: the report is of what ran until then")
        self._children.close()
        self._trace = self._session.stop(ending=error)
        notes = self._children.collect(self._trace)
        self._result = create_report(
            self._trace,
            subject=self.subject,
            mode=self._session.mode,
            device=self.describe_device(self._trace),
            notes=[*self._notes, *self._session.notes, *notes],
            waivers=self._waivers,
        )

    def finish(self) -> AuditReport:
        """Ends the audit before the block does, and returns the report."""
        self.end()
        return self.result

    @property
    def result(self) -> AuditReport:
        """The report. Raises AuditError before the block has ended."""
        if self._result is None:
            raise _unfinished()
        return self._result

    @property
    def trace(self) -> Trace:
        """What was observed. Raises AuditError before the block has ended."""
        if self._trace is None:
            raise _unfinished()
        return self._trace

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the report. Raises AuditError before the block has ended."""
        return self.result.findings


def read_classes(words: Iterable[str | GateClass]) -> frozenset[GateClass]:
    """Gate classes of their names; one string is a comma-separated list.

    Raises:
        AuditError: an unknown class.
    """
    if isinstance(words, str):
        words = [word for word in words.split(",") if word]
    found = set()
    for word in words:
        try:
            found.add(GateClass(word))
        except ValueError as error:
            known = [gate.value for gate in GateClass]
            required = f"classes of findings: {', '.join(known)}"
            remedy = did_you_mean(str(word), known)
            raise AuditError("hal.audit", required, repr(word), remedy) from error
    return frozenset(found)


def check_gate(report: AuditReport, fail_on: frozenset[GateClass]) -> None:
    """Raises AuditError if a finding fails the gate."""
    from hal.auditing.gate import gated_findings

    failed = gated_findings(report, fail_on)
    if not failed:
        return
    lines = [f"{f.title} at {f.where or 'an unknown place'} ({f.rule})" for f in failed]
    more = len(lines) - _MAX_NAMED
    shown = "; ".join(lines[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
    raise AuditError(
        f"audit of {report.subject}",
        f"no finding of {', '.join(sorted(fail_on))}",
        shown,
        failed[0].remedy or "see the report",
    )


def _unfinished() -> AuditError:
    return AuditError(
        "hal.audit",
        "the end of the block",
        "a block that is still running",
        "read the report after the `with` block",
    )
