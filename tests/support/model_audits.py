"""Audits of a model as it is, or with an implementation that is not what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hal.auditing.audit_waivers import AuditWaivers
from hal.auditing.document import AuditReport, Finding
from hal.auditing.gates import GateClass
from hal.candidates import Kernel, KernelCandidate
from hal.device import DeviceSpec
from hal.plugins.manager import load_backends
from hal_engine.audit.report import audit_model
from hal_engine.audit.running import AuditOptions
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model

NUM_LAYERS = 9
ENVIRONMENT = GateClass.IGNORED_SETTING  # what the tests' own environment is found to set
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "num_blocks": 128,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
}

Change = Callable[[int, Any, Kernel], Kernel]  # (number of the binding, request, kernel) -> kernel


@dataclass
class Auditor:
    """Audits one model. changed: candidate -> what its kernels become, site by site as bound."""

    folder: Path
    changed: dict[str, Change] = field(default_factory=dict)
    waivers: AuditWaivers = field(default_factory=AuditWaivers)
    use: dict[str, str] = field(default_factory=dict)

    def run(self, audit: AuditOptions | None = None, **options: Any) -> AuditReport:
        registry = load_backends()
        offered = registry.candidates

        def candidates(op: str, device: DeviceSpec) -> tuple[KernelCandidate, ...]:
            return tuple(self._changed(c) for c in offered(op, device))

        registry.candidates = candidates  # type: ignore[method-assign]
        planned = plan_model(
            self.folder,
            EngineOptions(**{**OPTIONS, **options}),
            registry,
            self.waivers.planning_book(),
            self.use,
            must_run=True,
        )
        audit = audit or AuditOptions(measure=False)
        return audit_model(planned, registry, audit, self.waivers)

    def _changed(self, candidate: KernelCandidate) -> KernelCandidate:
        change = self.changed.get(candidate.name)
        if change is None:
            return candidate
        numbers: list[int] = []

        def load() -> Any:
            bind = candidate.load()

            def changed_bind(request: Any, **static: Any) -> Kernel:
                numbers.append(len(numbers))
                return change(numbers[-1], request, bind(request, **static))

            return changed_bind

        return replace(candidate, load=load)


def of_rule(report: AuditReport, rule: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule == rule]
