"""The audit of an engine that serves: light mode, and a report whenever somebody asks.

Off unless a sample rate is set: then nothing is wrapped, and a call costs what it costs.
"""

from __future__ import annotations

from hal.auditing.document import AuditReport
from hal.auditing.surroundings import complete_report
from hal.binding import BoundOps
from hal_engine.audit.audited_runner import AuditedRunner
from hal_engine.audit.inspecting import Inspector
from hal_engine.audit.load import Load
from hal_engine.audit.observer import CallObserver
from hal_engine.audit.report import report_of
from hal_engine.audit.running import AuditOptions, Observed
from hal_engine.audit.step_mode import StepMode
from hal_engine.batch import ModelRunner
from hal_engine.planning import PlannedModel


class LiveAudit:
    """Gives the bound ops to build with, wraps the runner, and reports."""

    def __init__(self, planned: PlannedModel, every: int) -> None:
        """every: the number of steps of which at most one is timed and one is watched."""
        self._planned = planned
        self._options = AuditOptions(mode="light", measure=False, every=every)
        self._inspector = Inspector()
        self._observer = CallObserver()
        self._step = StepMode(self._observer)
        self._runner: AuditedRunner | None = None
        self.ops = BoundOps(
            planned.plan,
            observe=self._observer.observe,
            is_looking=lambda: self._observer.is_looking,
        )

    def wrap(self, runner: ModelRunner) -> AuditedRunner:
        """The runner for the engine."""
        self._runner = AuditedRunner(
            runner, self._observer, self._step, "light", self._options.every
        )
        return self._runner

    def report(self) -> AuditReport:
        """What was seen so far. From any thread; takes a moment, so not from the engine's."""
        observed = Observed(
            planned=self._planned,
            device=self._planned.device,
            options=self._options,
            load=Load(waves=(), unreachable={}),
            observer=self._observer.snapshot(),
            mode=self._step,
            ops=self.ops,
            inspector=self._inspector,
            num_steps=0 if self._runner is None else self._runner.num_steps,
            sampler=None if self._runner is None else self._runner.sampler,
            is_live=True,
        )
        return complete_report(report_of(observed), device_type=self._planned.device.torch_device)
