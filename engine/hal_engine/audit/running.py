"""Runs a model for an audit: builds it with observed ops and steps it through a load."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from hal.binding import BoundOps, CallCount
from hal.device import Confidence, DeviceSpec
from hal.plugins.registry import BackendRegistry
from hal_engine.api import GenerationRequest, RequestRefusedError
from hal_engine.audit.audited_runner import SAMPLE_EVERY, AuditedRunner, Mode
from hal_engine.audit.inspecting import Inspector
from hal_engine.audit.load import Load, given_load, synthetic_load
from hal_engine.audit.observer import CallObserver
from hal_engine.audit.profiling import profiled_products
from hal_engine.audit.step_mode import StepMode
from hal_engine.audit.step_sampler import StepSampler
from hal_engine.batch import ModelRunner
from hal_engine.building import Progress, build_runner
from hal_engine.engine_core import EngineCore
from hal_engine.planning import PlannedModel
from hal_engine.scheduler import SchedulerConfig
from hal_engine.tensor_parallel import TensorParallelRunner
from hal_engine.tokenizer import load_tokenizer
from hal_engine.worker_starting import WorkerOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """verify: share of watched calls that the reference runs again. prompts: texts, or none for a
    synthetic load. every: in light mode, see `AuditedRunner`. measure: rates of a device that
    nobody measured, for a second or two."""

    mode: Mode = "full"
    verify: float = 0.0
    prompts: Sequence[str] = ()
    measure: bool = True
    seed: int = 0
    every: int = SAMPLE_EVERY


@dataclass(slots=True, kw_only=True)
class Observed:
    """What an audited run left behind."""

    planned: PlannedModel
    device: DeviceSpec
    options: AuditOptions
    load: Load
    observer: CallObserver
    mode: StepMode
    ops: BoundOps
    counts: list[CallCount] = field(default_factory=list)  # at the end of the load
    worker_counts: list[list[CallCount]] = field(default_factory=list)  # of ranks 1 and above
    profiled: Counter[str] = field(default_factory=Counter)  # see `profiled_products`
    inspector: Inspector
    num_steps: int = 0
    sampler: StepSampler | None = None
    forward_ns: int = 0  # of timed forwards, wall
    errors: list[str] = field(default_factory=list)
    is_live: bool = False  # of an engine that goes on: what it did not reach is no finding


def observe_model(
    planned: PlannedModel,
    registry: BackendRegistry,
    options: AuditOptions,
    order: WorkerOrder | None = None,
    progress: Progress | None = None,
) -> Observed:
    """Loads the model, runs the load and gathers what was seen. Raises what loading raises.

    order: what other ranks plan from; needed where --use, waivers or disabled plug-ins are theirs
    too.
    """
    device = _measured(planned.device, registry, options)
    inspector = Inspector(share=options.verify, seed=options.seed)
    is_inspected = options.mode == "full" or options.verify > 0
    observer = CallObserver(inspector if is_inspected else None)
    step = StepMode(observer)
    bound = BoundOps(planned.plan, observe=observer.observe)
    order = order or WorkerOrder(
        model=planned.config.source,
        options=planned.options.model_dump(mode="json"),
        use={},
        waivers="",
    )
    load = _load(planned, options)  # may raise: before there is something to close
    runner, ops = build_runner(planned, registry, order, progress, ops=bound)
    audited = AuditedRunner(runner, observer, step, options.mode, options.every)
    observed = Observed(
        planned=planned,
        device=device,
        options=options,
        load=load,
        observer=observer,
        mode=step,
        ops=ops,
        inspector=inspector,
    )
    try:
        run_load(observed, audited)
        observed.counts = list(ops.counts())
        if isinstance(runner, TensorParallelRunner):
            observed.worker_counts = runner.worker_counts()
        if options.mode == "full":
            observed.profiled = _profile(observed, runner)
    finally:
        audited.close()
    return observed


def _load(planned: PlannedModel, options: AuditOptions) -> Load:
    if not options.prompts:
        return synthetic_load(planned, options.seed)
    with contextlib.closing(load_tokenizer(planned.config)) as tokenizer:
        encoded = [
            tokenizer.encode(text, add_special_tokens=True, parse_special=False)
            for text in options.prompts
        ]
    return given_load([ids for ids in encoded if ids])


def _measured(device: DeviceSpec, registry: BackendRegistry, options: AuditOptions) -> DeviceSpec:
    known = device.evidence.get("memory_bandwidth")
    if known is not None and known.confidence is Confidence.MEASURED:
        return device
    return registry.measure(device) if options.measure else device


def run_load(observed: Observed, runner: AuditedRunner) -> None:
    """Every wave to its end, in this thread."""
    core = _core(observed, runner)
    with torch.inference_mode():
        for wave in observed.load.waves:
            for request in wave:
                _submit(core, request, observed.errors)
            while core.has_work:
                _step(core, observed)
    observed.num_steps, observed.forward_ns = runner.num_steps, runner.forward_ns
    observed.sampler = runner.sampler


def _core(observed: Observed, runner: ModelRunner) -> EngineCore:
    options = observed.planned.options
    return EngineCore(
        runner,
        load_tokenizer(observed.planned.config),
        SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_reuse=options.prefix_reuse,
        ),
    )


def _profile(observed: Observed, runner: ModelRunner) -> Counter[str]:
    """The first request of the load again, without the modes, under torch's profiler."""
    request = observed.load.waves[0][0]
    with torch.inference_mode():
        return profiled_products(_core(observed, runner), request)


def _submit(core: EngineCore, request: GenerationRequest, errors: list[str]) -> None:
    try:
        core.refuse_if_too_long(request)
    except RequestRefusedError as error:
        errors.append(f"{request.request_id}: {error}")
        return
    core.submit(request, None, time.monotonic())


def _step(core: EngineCore, observed: Observed) -> None:
    is_full = observed.options.mode == "full"
    with observed.mode if is_full else nullcontext():
        events = core.step()
    observed.errors += [
        f"{event.request_id}: {event.error}" for _, event in events if event.error is not None
    ]
