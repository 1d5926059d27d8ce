"""From a model's name to a running engine: plan, bind, load, start."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.binding import BoundOps
from hal.errors import KernelBuildError
from hal.plugins.manager import load_backends
from hal.plugins.registry import BackendRegistry
from hal.waivers import WaiverBook, load_waivers
from hal_engine.api import OpCallCount, Tokenizer
from hal_engine.batch import ModelRunner
from hal_engine.building import Progress, build_runner
from hal_engine.compute_thread import ComputeThread
from hal_engine.engine_loop import Engine
from hal_engine.model_source import resolve_model
from hal_engine.options import EngineOptions
from hal_engine.planning import PlannedModel, plan_model
from hal_engine.rehearsal import rehearse
from hal_engine.scheduler import SchedulerConfig
from hal_engine.size_rehearsal import compiles_at_first_call, rehearse_sizes
from hal_engine.tokenizer import load_tokenizer
from hal_engine.worker_starting import WorkerOrder

if TYPE_CHECKING:
    from hal_engine.audit.live import LiveAudit


def open_engine(
    model: str | Path,
    *,
    use: Mapping[str, str] | None = None,
    waivers: str | Path = "",
    registry: BackendRegistry | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Engine:
    """A running engine for `model` (a folder or a .gguf file), for scripts and benchmarks.

    options: fields of `EngineOptions`. Raises what planning and loading raise; the caller closes
    the engine (`await engine.close()`).
    """
    chosen = EngineOptions.model_validate(options)
    registry = registry or load_backends()
    book = load_waivers(waivers) if waivers else WaiverBook()
    planned = plan_model(resolve_model(model), chosen, registry, book, use, must_run=True)
    return start_engine(planned, registry, use=use, waivers=waivers, progress=progress)


def start_engine(
    planned: PlannedModel,
    registry: BackendRegistry,
    *,
    use: Mapping[str, str] | None = None,
    waivers: str | Path = "",
    disabled_plugins: tuple[str, ...] = (),
    progress: Progress | None = None,
    audit_every: int = 0,
) -> Engine:
    """Builds and starts what was planned.

    audit_every: see `LiveAudit`; 0 audits nothing.

    use, waivers, disabled_plugins: what the plan was made with, for the other ranks. A kernel that
    any rank cannot compile is left out of a second plan, which all ranks make and which is as
    strict: what it would lose is an error that names the kernel, unless a waiver allows it; a
    waiver for that which nothing needed is an error as well. Raises WaiverError, CheckpointError,
    ConfigError (the tokenizer), BindingError, PlanError, WorkerError; KernelBuildError for a kernel
    that was left out and runs none the less.
    """
    without: dict[str, str] = {}
    while True:
        try:
            order = WorkerOrder(
                model=planned.config.source,
                options=planned.options.model_dump(mode="json"),
                use=dict(use or {}),
                waivers=str(waivers),
                disabled_plugins=disabled_plugins,
                without=dict(without),
            )
            return _start(planned, registry, order, progress, audit_every)
        except KernelBuildError as error:
            found = _left_out(error)
            if not found.keys() - without.keys():
                raise
            without |= {name: why for name, why in found.items() if name not in without}
            planned = plan_without(planned, registry, without, use=use, waivers=waivers)


def _left_out(error: KernelBuildError) -> dict[str, str]:
    """Implementation -> what was found, of all ranks that failed; the rank where it is not 0."""
    return {
        failure.implementation: f"{failure.required}{failure.where} does not compile: "
        f"{failure.found}"
        for failure in reversed(error.failures)
    }


def plan_without(
    planned: PlannedModel,
    registry: BackendRegistry,
    without: Mapping[str, str],
    *,
    use: Mapping[str, str] | None = None,
    waivers: str | Path = "",
) -> PlannedModel:
    """The plan without implementations that do not work here (name -> what was found), which is as
    strict as the first one. Raises what planning raises."""
    return plan_model(
        Path(planned.config.source),
        planned.options,
        registry,
        load_waivers(waivers) if waivers else WaiverBook(),
        use,
        device=planned.device,
        must_run=True,
        without=without,
    )


def _start(
    planned: PlannedModel,
    registry: BackendRegistry,
    order: WorkerOrder,
    progress: Progress | None,
    audit_every: int,
) -> Engine:
    with contextlib.ExitStack() as owned:
        tokenizer: Tokenizer = load_tokenizer(planned.config)
        owned.callback(tokenizer.close)
        options = planned.options
        scheduling = SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_waiting=options.max_waiting,
            prefix_reuse=options.prefix_reuse,
        )
        live = _live_audit(planned, audit_every)
        thread = ComputeThread()
        owned.callback(thread.end)
        runner, ops = thread.call(
            lambda: _build(planned, registry, order, progress, live, tokenizer, scheduling)
        )
        owned.callback(runner.close)
        engine = Engine(
            model_id(planned),
            runner,
            tokenizer,
            scheduling,
            plan_json=planned.plan.to_dict(),
            degraded_reasons=planned.plan.waivers_in_use(),
            op_calls=lambda: op_call_counts(ops),
            thread=thread,
            audit_report=None if live is None else lambda: live.report().to_json(),
        )
        owned.pop_all()
    return engine


def _build(
    planned: PlannedModel,
    registry: BackendRegistry,
    order: WorkerOrder,
    progress: Progress | None,
    live: LiveAudit | None,
    tokenizer: Tokenizer,
    scheduling: SchedulerConfig,
) -> tuple[ModelRunner, BoundOps]:
    """The runner, which has run once. On the thread that will run the steps."""
    own = None if live is None else live.ops
    runner, ops = build_runner(planned, registry, order, progress, ops=own)
    with contextlib.ExitStack() as owned:
        owned.callback(runner.close)
        rehearse(runner, tokenizer, scheduling)
        if compiles_at_first_call(planned.plan):
            rehearse_sizes(
                runner,
                planned.plan,
                max_num_batched_tokens=scheduling.max_num_batched_tokens,
                max_num_seqs=scheduling.max_num_seqs,
                progress=progress,
            )
        for unneeded in planned.plan.pending_waivers:
            raise unneeded  # every kernel compiled
        owned.pop_all()
    return (runner if live is None else live.wrap(runner)), ops


def _live_audit(planned: PlannedModel, every: int) -> LiveAudit | None:
    if not every:
        return None
    from hal_engine.audit.live import LiveAudit  # imported where it is used: it is off by default

    return LiveAudit(planned, every)


def model_id(planned: PlannedModel) -> str:
    """The name of the folder or the file without its ending."""
    source = Path(planned.config.source)
    return source.stem if planned.config.source_format == "gguf" else source.resolve().parent.name


def op_call_counts(ops: BoundOps) -> list[OpCallCount]:
    """Calls so far on rank 0, one row per call site and token range."""
    return [
        OpCallCount(
            site=count.site,
            op=count.op,
            phase=count.phase,
            implementation=count.implementation,
            tier=count.tier,
            token_range=str(count.tokens),
            calls=count.calls,
        )
        for count in ops.counts()
    ]
