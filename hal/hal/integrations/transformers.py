"""Routes a transformers model's products, experts, gathers and attention through bound ops.

What the model calls is found by a rehearsal of a few tokens; it is planned like any model of ours,
and whatever a second rehearsal still sees outside bound ops is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.binding import CallCount
from hal.integrations.allowances import Allowances
from hal.integrations.rehearsal import Inputs, Step, rehearsal_steps
from hal.integrations.router import Router
from hal.integrations.routing_refusals import check_model, device_of
from hal.measurements import with_measurements
from hal.plan import Plan
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook, load_waivers

if TYPE_CHECKING:
    from hal.auditing.document import AuditReport

DEFAULT_MAX_TOKENS = 8192


def route(
    model: Any,
    device: str | None = None,
    *,
    strict: bool = True,
    waivers: WaiverBook | Path | str | None = None,
    use: Mapping[str, str] | None = None,
    allow: Sequence[str] = (),
    max_tokens: int = DEFAULT_MAX_TOKENS,
    example_inputs: Sequence[Inputs] | Inputs | None = None,
    registry: BackendRegistry | None = None,
) -> RoutedModel:
    """Routes `model` until `undo()` or the end of a `with`.

    device: id of the device that the model is on, where torch's name does not say it. strict: a
    lost fast path or a request that nothing serves raises; otherwise it is in `plan.violations`,
    and a request that nothing serves raises in either case. waivers, use: as of `hal plan`. allow:
    globs over ops or file:line that may stay outside. max_tokens: most tokens of one forward, over
    the batch. example_inputs: what forward takes by name, one or several, for models that take more
    than token ids or an image. registry: plug-ins that are loaded already.
    Raises RoutingError (the model cannot be routed: why), PlanError, SelectionError, WaiverError.
    On any error the model is as it was.
    """
    check_model(model)
    registry = load_backends() if registry is None else registry
    examples = [example_inputs] if isinstance(example_inputs, Mapping) else example_inputs
    with ExitStack() as stack:
        router = Router(
            model,
            with_measurements(device_of(model, device, registry)),
            registry,
            waivers=_waiver_book(waivers),
            use=use or {},
            is_strict=strict,
            max_tokens=max_tokens,
            undo=stack,
        )
        router.find_own()
        router.check_own()
        steps = rehearsal_steps(model, examples)
        wanted = router.rehearse(steps)
        plan = router.plan()
        router.bind(plan)
        router.check_routed(steps, wanted, Allowances(allow))
        return RoutedModel(router, plan, steps, stack.pop_all())


def _waiver_book(waivers: WaiverBook | Path | str | None) -> WaiverBook:
    if isinstance(waivers, WaiverBook):
        return waivers
    return WaiverBook() if waivers is None else load_waivers(waivers)


class RoutedModel:
    """A model whose calls go through bound ops. A context manager that undoes it at its end.

    plan: what runs. model: the same object that was routed.
    """

    def __init__(self, router: Router, plan: Plan, steps: Sequence[Step], undo: ExitStack) -> None:
        self.model = router.model
        self.plan = plan
        self._router = router
        self._steps = steps
        self._undo = undo

    def counts(self) -> list[CallCount]:
        """Calls since routing (the rehearsal not included), one row per call site and range."""
        return self._router.counts()

    def audit(self, *example_inputs: Inputs) -> AuditReport:
        """Runs the inputs (those of the rehearsal without any) and compares what ran with the plan:
        calls, leaves, and whatever ran outside a bound op with its file:line."""
        from hal.integrations.routed_audit import audit_report

        steps = rehearsal_steps(self.model, example_inputs) if example_inputs else self._steps
        before = self.counts()
        spy, escaped = self._router.spied(steps)
        return audit_report(
            self.model, self.plan, self._router.device, before, self.counts(), spy, escaped
        )

    def undo(self) -> None:
        """The model as it was before. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> RoutedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


__all__ = ["DEFAULT_MAX_TOKENS", "RoutedModel", "route"]
