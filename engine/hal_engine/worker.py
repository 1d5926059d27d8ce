"""The process of a tensor-parallel rank above 0: plans, loads, then runs the batches it is sent.

Standard input: a line of JSON with the order, then a batch a line, or a request for its counters;
its end means to stop. Standard output: a line of JSON when it has planned and one when it is ready,
or one that says why not; the counters, when they are asked for; before it ends by an error, what
that was, be it a kernel that did not compile when it was first called or anything else. It refuses
to run a plan that differs from rank 0's, so ranks cannot disagree on what runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from dataclasses import astuple
from pathlib import Path
from typing import IO, Any, NoReturn

from hal.binding import BoundOps
from hal.errors import HalError, KernelBuildError, PlanError
from hal.ops.collective import CollectiveGroup
from hal.plugins.manager import load_backends
from hal.waivers import WaiverBook, load_waivers
from hal_engine.batch import Batch
from hal_engine.building import build_rank
from hal_engine.checkpoint.protocol import CheckpointError
from hal_engine.config import ConfigError
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.runner import LocalRunner
from hal_engine.worker_pipes import failure_answer
from hal_engine.workers import COUNTS_REQUEST


def _build(
    order: dict[str, Any], channel: IO[str]
) -> tuple[LocalRunner, BoundOps, CollectiveGroup]:
    registry = load_backends(disabled=order["disabled_plugins"])
    waivers = load_waivers(order["waivers"]) if order["waivers"] else WaiverBook()
    options = EngineOptions.model_validate(order["options"])
    planned = plan_model(
        Path(order["model"]),
        options,
        registry,
        waivers,
        order["use"],
        must_run=True,  # as on rank 0: a waiver may be needed until every kernel compiled
        without=order["without"],
    )
    if planned.plan.hash != order["plan_hash"]:
        raise PlanError(
            f"rank {order['rank']}",
            f"the plan of rank 0, {order['plan_hash']}",
            f"{planned.plan.hash} ({'; '.join(planned.plan.notes) or 'without notes'})",
            "every rank needs the same versions, environment, settings and devices",
        )
    _answer(channel, state="planned")
    runtime = registry.create_runtime(planned.device)
    group = runtime.create_group(order["rank"], order["world_size"], order["rendezvous"])
    runner, ops = build_rank(planned, order["rank"], group, order["num_blocks"])
    return runner, ops, group


def _answer(channel: IO[str], **fields: Any) -> None:
    channel.write(json.dumps(fields) + "\n")
    channel.flush()


def main() -> int:
    """Exit code 0 when told to stop; 1 after any error, which rank 0 is told of."""
    # A terminal's Ctrl-C is for rank 0, which then closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print must not be read as an answer: it goes to standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        runner, ops, group = _build(json.loads(sys.stdin.buffer.readline()), channel)
        _answer(channel, state="ready")
        _run(runner, ops, group, channel)
    except BaseException as error:  # noqa: BLE001 - a rank that ends unheard is searched for
        _report(error, channel)
        return 1
    return 0


def _run(runner: LocalRunner, ops: BoundOps, group: CollectiveGroup, channel: IO[str]) -> None:
    """The batches until the input ends."""
    for line in sys.stdin.buffer:
        if line == COUNTS_REQUEST:
            _answer(channel, state="counts", counts=[astuple(count) for count in ops.counts()])
            continue
        runner.execute(Batch.from_json(line))
        group.check()


def _report(error: BaseException, channel: IO[str]) -> None:
    """Tells rank 0; then standard error, where the error's own words do not say all."""
    with contextlib.suppress(OSError):  # rank 0 may be gone
        if isinstance(error, KernelBuildError):
            _answer(channel, **failure_answer(error))
        else:
            _answer(channel, state="failed", error=f"{type(error).__name__}: {error}")
    if not isinstance(error, HalError | ConfigError | CheckpointError):
        traceback.print_exception(error)


def run_process() -> NoReturn:
    """`main`, and the end of the process whatever it raised.

    Without the interpreter's own teardown: a peer may be gone, and gloo would wait for it.
    """
    code = 1
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - nothing is left to raise to
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


if __name__ == "__main__":
    run_process()
