"""From a model path and options to a plan: reads config.json or a GGUF header, never a weight."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hal.device import DeviceSpec
from hal.measurements import with_measurements
from hal.plan import Plan
from hal.planner import PlanInputs, create_plan
from hal.plugins.registry import BackendRegistry
from hal.step_costs import Step
from hal.waivers import WaiverBook
from hal_engine.config import ModelConfig, load_model_config
from hal_engine.device_choice import present_device
from hal_engine.group_link import link_of_group
from hal_engine.models.accounting import kv_bytes_per_sequence, kv_bytes_per_token, kv_copies
from hal_engine.models.device_formats import with_fp8_of
from hal_engine.models.joined_sites import model_joins
from hal_engine.models.site_parts import HOST_LINK
from hal_engine.models.sites import model_sites
from hal_engine.models.step_limits import StepLimits
from hal_engine.options import EngineOptions
from hal_engine.plan_notes import call_notes, device_notes, model_notes
from hal_engine.precision import Precision, resolve_precision
from hal_engine.runnable import check_runnable, check_runnable_on
from hal_engine.sparse_choice import allow_dense_attention, check_sparse_off
from hal_engine.step_capture import capture_notes, capture_scope

# Longer contexts than this are served on request only: their KV cache would take the memory.
DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A plan together with what it was made from."""

    config: ModelConfig
    precision: Precision
    options: EngineOptions
    device: DeviceSpec
    plan: Plan
    max_model_len: int


def plan_model(
    model: Path,
    options: EngineOptions,
    registry: BackendRegistry,
    waivers: WaiverBook,
    use: Mapping[str, str] | None = None,
    *,
    device: DeviceSpec | None = None,
    is_strict: bool = True,
    must_run: bool = False,
    without: Mapping[str, str] | None = None,
) -> PlannedModel:
    """Plans `model` for a device of `registry`, or for `device`, which need not be here.

    is_strict: False makes a report, with its violations as data, instead of raising for them.
    must_run: True for a plan that is to be executed, which not every model can be. without: names
    of implementations that were found not to work here, with what was found. Raises
    ConfigError (the model), SelectionError and PlanError (a model that cannot run, an explicit
    choice that cannot serve, lost fast paths), WaiverError, DeviceNotFoundError.
    """
    config = load_model_config(model)
    if must_run:
        check_runnable(config)
    options = _with_block_size(options, config)
    if device is None:
        device = with_measurements(present_device(registry, options.device))
    if must_run:
        check_runnable_on(device)
    precision = resolve_precision(
        config, options.precision, options.kv_dtype, device.features, options.index_dtype
    )
    policy = registry.policy(device)
    if without:
        policy = replace(policy, disabled={**policy.disabled, **without})
    link = link_of_group(registry, device, options.tp)
    is_dense = options.sparse_attention == "off"
    if is_dense:
        check_sparse_off(config, policy, device)
    limits = StepLimits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
        attends_sparsely=not is_dense,
    )
    sites = with_fp8_of(
        model_sites(config, precision, limits, options.tp, link or HOST_LINK), device
    )
    notes = [
        *precision.notes,
        *model_notes(config, options.tp),
        *call_notes(sites),
        *device_notes(device, options.tp),
        *(f"{name} is left out: {why}" for name, why in (without or {}).items()),
    ]
    if per_sequence := kv_bytes_per_sequence(config, precision):
        notes.append(
            f"each sequence takes {per_sequence / 2**20:,.1f} MiB besides, however long it is: "
            "windows and open states of compressors"
        )
    if is_dense:
        notes += allow_dense_attention(sites, device, waivers, options.allow_semantics)
    inputs = PlanInputs(
        sites=sites,
        device=device,
        policy=policy,
        candidates=registry.candidates,
        waivers=waivers,
        use=use or {},
        allowed_semantics=frozenset(options.allow_semantics),
        link=link,
        is_to_run=must_run,
        joins=model_joins(sites),
        captures=capture_scope(device, policy, options),
    )
    max_model_len = options.max_model_len or min(
        config.max_position_embeddings, DEFAULT_MAX_MODEL_LEN
    )
    plan = create_plan(
        inputs,
        model=_model_summary(config),
        settings=_settings_summary(options, precision, max_model_len, use or {}),
        kv_bytes_per_token=kv_bytes_per_token(config, precision),
        kv_copies=kv_copies(config, options.tp),
        notes=[*notes, *_failed_plugins(registry)],
        versions=_versions(),
        world_size=options.tp,
        steps=_steps(options),
        is_strict=is_strict,
        on_decision=registry.decision_made,
    )
    plan = replace(plan, notes=[*plan.notes, *capture_notes(plan, device, options)])
    return PlannedModel(
        config=config,
        precision=precision,
        options=options,
        device=device,
        plan=plan,
        max_model_len=max_model_len,
    )


def _with_block_size(options: EngineOptions, config: ModelConfig) -> EngineOptions:
    """Kernels for packed rows want pages of 64; the CPU's are measured with 16."""
    if options.block_size:
        return options
    is_packed = config.mla is not None or config.compressed is not None
    return options.model_copy(update={"block_size": 64 if is_packed else 16})


def _steps(options: EngineOptions) -> list[Step]:
    """What a plan gives least times for: one sequence, a full batch, a full prefill step."""
    decode = dict.fromkeys((1, options.max_num_seqs))
    return [
        *(Step(phase="decode", tokens=tokens) for tokens in decode),
        Step(phase="prefill", tokens=options.max_num_batched_tokens),
    ]


def _failed_plugins(registry: BackendRegistry) -> list[str]:
    """Plug-ins whose candidates this plan could not consider."""
    return [
        f"plug-in {state.entry} is {state.status.value}: {state.reason}"
        for state in registry.states
        if state.status.is_trouble
    ]


def _model_summary(config: ModelConfig) -> dict[str, Any]:
    """The configuration without the path, so that equal models have equal plans anywhere."""
    summary = config.to_dict()
    summary["source"] = Path(config.source).name
    return summary


def _settings_summary(
    options: EngineOptions, precision: Precision, max_model_len: int, use: Mapping[str, str]
) -> dict[str, Any]:
    return {
        **options.model_dump(mode="json"),
        "dtype": precision.dtype,
        "kv_dtype": precision.kv_dtype,
        "max_model_len": max_model_len,
        "use": dict(use),
    }


def _versions() -> dict[str, str]:
    names = ("halstack", "torch", "numba", "numpy")
    return {"python": platform.python_version(), **{n: metadata.version(n) for n in names}}
