"""Builds what runs from what was planned: binds the ops, reads the weights, makes the KV cache."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from hal.binding import BoundOps
from hal.device import GRAPH_CAPTURE
from hal.errors import KernelBuildError, PlanError
from hal.hookspecs import CapturingRuntime, Runtime
from hal.ops.collective import CollectiveGroup
from hal.plugins.registry import BackendRegistry
from hal_engine.batch import ModelRunner
from hal_engine.checkpoint.opening import open_checkpoint
from hal_engine.checkpoint.tensors import verify_checkpoint
from hal_engine.models.decoder import build_decoder
from hal_engine.planning import PlannedModel
from hal_engine.runnable import check_runnable, check_runnable_on
from hal_engine.runner import LocalRunner
from hal_engine.shards import shard_model
from hal_engine.step_capture import captured_sizes
from hal_engine.tensor_parallel import TensorParallelRunner
from hal_engine.worker_starting import WorkerOrder, start_workers
from hal_engine.workers import Workers

# Of the memory that is free once the weights are read, the share that the KV cache may take.
KV_MEMORY_SHARE = 0.4
# And no more than this without being asked (num_blocks), unless one sequence needs it.
DEFAULT_KV_BYTES = 4 << 30

Progress = Callable[[str, int, int], None]  # (what, done, in all)


def build_runner(
    planned: PlannedModel,
    registry: BackendRegistry,
    order: WorkerOrder,
    progress: Progress | None = None,
    *,
    ops: BoundOps | None = None,
) -> tuple[ModelRunner, BoundOps]:
    """The runner of rank 0, with its workers when there are several ranks.

    ops: an audit's own of rank 0, which look inside.

    Raises CheckpointError, BindingError, WorkerError, PlanError (no room for a KV cache),
    KernelBuildError with the failures of all ranks.
    """
    check_runnable_on(planned.device)  # before a runtime takes the device
    world_size = planned.options.tp
    runtime = registry.create_runtime(planned.device)
    num_blocks = choose_num_blocks(planned, runtime.free_memory_bytes())
    if world_size == 1:
        return build_rank(planned, 0, None, num_blocks, progress, ops=ops, runtime=runtime)
    with contextlib.ExitStack() as ending:
        # Whatever goes wrong on the way, no worker, connection or cache is left behind.
        afterwards = ending.enter_context(contextlib.ExitStack())
        with tempfile.TemporaryDirectory(prefix="halstack-") as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            workers = start_workers(order, world_size, rendezvous, num_blocks, planned.plan.hash)
            ending.callback(workers.stop)
            try:
                # A worker that cannot take part would let the rendezvous run into its timeout.
                workers.wait_until("planned")
                group = _meet(runtime, workers, world_size, rendezvous)
                afterwards.callback(group.close)
                local, ops = build_rank(planned, 0, group, num_blocks, progress, ops=ops)
                afterwards.callback(local.close)
                workers.wait_until("ready")
            except KernelBuildError as error:
                workers.add_build_failures(error)
                raise
        ending.pop_all()
    return TensorParallelRunner(local, workers, group), ops


def _meet(runtime: Runtime, workers: Workers, world_size: int, rendezvous: str) -> CollectiveGroup:
    """The group of all ranks. Raises WorkerError, or KernelBuildError, of a rank that did not
    come."""
    try:
        return runtime.create_group(0, world_size, rendezvous)
    except RuntimeError as error:
        raise workers.explain(error) from error


def build_rank(
    planned: PlannedModel,
    rank: int,
    group: CollectiveGroup | None,
    num_blocks: int,
    progress: Progress | None = None,
    *,
    ops: BoundOps | None = None,
    runner_type: type[LocalRunner] = LocalRunner,
    runtime: Runtime | None = None,
) -> tuple[LocalRunner, BoundOps]:
    """One rank's runner in this process. ops, runner_type: an audit's own, which look inside.
    runtime: captures the steps that the plan says are; without one all run call by call."""
    config, options = planned.config, planned.options
    check_runnable(config)
    check_runnable_on(planned.device)
    captured = captured_sizes(planned.plan, planned.device, options, rank)
    if captured and runtime is not None and not isinstance(runtime, CapturingRuntime):
        raise PlanError(
            f"runtime of {planned.device.device_id} ({planned.device.backend})",
            f"steps that can be captured, as its feature {GRAPH_CAPTURE} says",
            f"{type(runtime).__name__} without a method capture",
            "report it to the plug-in; meanwhile set engine.capture_steps to off",
        )
    ops = ops or BoundOps(planned.plan, rank)
    shard = shard_model(config, rank, options.tp)
    checkpoint = open_checkpoint(config)
    try:
        verify_checkpoint(
            config, checkpoint, lambda done, total, _: _tell(progress, "check", done, total)
        )
        decoder = build_decoder(
            config=config,
            precision=planned.precision,
            shard=shard,
            ops=ops,
            weights=checkpoint,
            group=group,
            max_model_len=planned.max_model_len,
            progress=lambda done, total: _tell(progress, "load", done, total),
        )
    finally:
        checkpoint.close()
    runner = runner_type(
        config=config,
        precision=planned.precision,
        shard=shard,
        decoder=decoder,
        ops=ops,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_model_len=planned.max_model_len,
        runtime=runtime,
        captured=captured,
    )
    unbound = ops.unbound_sites()
    if unbound:
        raise PlanError(
            f"model {config.source}",
            "every planned call site bound",
            f"not bound: {', '.join(unbound)}",
            "the call sites and the model disagree: report it",
        )
    runner.rehearse_captures()
    return runner, ops


def _tell(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


def choose_num_blocks(planned: PlannedModel, free_bytes: int) -> int:
    """KV blocks: as asked for, else what the sequences can use, within the free memory."""
    options = planned.options
    if options.num_blocks:
        return options.num_blocks
    block_bytes = planned.plan.kv_bytes_per_token * options.block_size
    weights = Path(planned.config.source)
    folder_bytes = (
        weights.stat().st_size
        if planned.config.source_format == "gguf"
        else sum(f.stat().st_size for f in weights.parent.glob("*.safetensors"))
    )
    # Weights may be widened up to fourfold and packed twice while they are read.
    budget = max(0, free_bytes - 6 * folder_bytes) * KV_MEMORY_SHARE
    useful = options.max_num_seqs * -(-planned.max_model_len // options.block_size)
    affordable = int(budget // block_bytes)
    needed = -(-planned.max_model_len // options.block_size)
    if affordable < needed:
        raise PlanError(
            f"KV cache of {planned.config.source}",
            f"{needed * block_bytes / 2**30:.1f} GiB for one sequence of {planned.max_model_len}",
            f"{budget / 2**30:.1f} GiB ({KV_MEMORY_SHARE:.0%} of the free memory less the weights)",
            "lower max_model_len, or set num_blocks",
        )
    return min(useful, affordable, max(needed, DEFAULT_KV_BYTES // block_bytes))
