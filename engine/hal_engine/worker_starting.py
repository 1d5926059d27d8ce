"""Starting the processes of ranks 1 and above: all of them run, or none is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from hal_engine.child_processes import end_child
from hal_engine.worker_pipes import Worker, write_in_time
from hal_engine.workers import WorkerError, Workers

# A pipe holds any usual order at once; a larger one is read once the process has started, which
# takes long on a busy machine.
ORDER_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What a worker needs to make the same plan as rank 0. Plain values only.

    without: implementations that some rank cannot compile -> what was found.
    """

    model: str
    options: dict[str, Any]
    use: dict[str, str]
    waivers: str  # path, or ""
    disabled_plugins: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)


def start_workers(
    order: WorkerOrder, world_size: int, rendezvous: str, num_blocks: int, plan_hash: str
) -> Workers:
    """Starts ranks 1 … world_size-1; they begin to plan and load at once.

    Raises WorkerError for one that does not take its order, and what starting a process raises
    (OSError). Either way those that were started are ended first.
    """
    workers: list[Worker] = []
    with contextlib.ExitStack() as owned:
        owned.callback(lambda: Workers(workers).stop())
        for rank in range(1, world_size):
            workers.append(_start_worker(rank))
        deadline = time.monotonic() + ORDER_DEADLINE_S
        for worker in workers:
            first = {
                **asdict(order),
                "rank": worker.rank,
                "world_size": world_size,
                "rendezvous": rendezvous,
                "num_blocks": num_blocks,
                "plan_hash": plan_hash,
            }
            _give_order(worker, json.dumps(first).encode() + b"\n", deadline)
        owned.pop_all()
    return Workers(workers)


def _start_worker(rank: int) -> Worker:
    process = subprocess.Popen(
        [sys.executable, "-m", "hal_engine.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    if process.stdin is None or process.stdout is None:
        end_child(process, 0.0)
        raise WorkerError(f"rank {rank}", "pipes to the worker", "none", "report it")
    os.set_blocking(process.stdin.fileno(), False)  # see Workers.send
    return Worker(rank, process, process.stdin, process.stdout)


def _give_order(worker: Worker, line: bytes, deadline: float) -> None:
    who = f"tensor-parallel rank {worker.rank} (pid {worker.process.pid})"
    required = f"a worker that reads its order within {ORDER_DEADLINE_S:g} s"
    remedy = "its standard error tells more; the workers are ended"
    try:
        left = write_in_time(worker.stdin.fileno(), line, max(0.0, deadline - time.monotonic()))
    except OSError as error:
        raise WorkerError(who, required, f"it closed its input: {error}", remedy) from error
    if left:
        found = f"{left:,} of {len(line):,} bytes are unread"
        raise WorkerError(who, required, found, remedy)
