"""Tensor parallelism: rank 0 runs in the engine, the other ranks in processes of their own.

Rank 0 sends each batch to every worker as one line of JSON on its standard input (no pickle, no
socket); all ranks then meet in the plan's collectives. A worker that dies breaks its connections
at once; one that freezes lets a collective run into its timeout. Either way `execute` raises, and
the engine answers every request with the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from hal.binding import CallCount
from hal.errors import HalError, KernelBuildError
from hal.ops.collective import CollectiveGroup
from hal.ops.request import TokenRange
from hal_engine.batch import Batch
from hal_engine.runner import LocalRunner
from hal_engine.worker_pipes import (
    CLOSED_OUTPUT,
    Worker,
    failure_in,
    read_answer,
    write_in_time,
)

READY_DEADLINE_S = 300.0
STOP_DEADLINE_S = 5.0
GATHER_S = 2.0  # for other ranks to say that they cannot compile it either
PEER_END_S = 0.2  # between ranks that end of the same: who told an error, who could not
SEND_DEADLINE_S = 10.0  # a worker that runs reads its batch at once
COUNTS_REQUEST = b'"counts"\n'  # in place of a batch: the worker answers with its counters
_MOST_COUNTS_BYTES = 64 << 20


class WorkerError(HalError):
    """A tensor-parallel worker did not start, died or stopped answering."""


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


class Workers:
    """The processes of ranks 1 and above."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait_until(self, state: Literal["planned", "ready"]) -> None:
        """Returns when every worker has made rank 0's plan, or has loaded its weights as well.

        Raises WorkerError with the worker's own words if one fails or takes too long, and
        KernelBuildError if what fails is a kernel.
        """
        deadline = time.monotonic() + READY_DEADLINE_S
        for worker in self._workers:
            answer = read_answer(worker, deadline)
            failure = failure_in(answer, worker.rank)
            if failure is not None:
                raise failure
            if answer.get("state") != state:
                raise WorkerError(
                    f"tensor-parallel rank {worker.rank}",
                    "a worker that plans as rank 0 does and has loaded its weights within "
                    f"{READY_DEADLINE_S:.0f} s",
                    str(answer.get("error", answer)),
                    "see the error; the same model must be readable by every rank",
                )

    def send(self, batch: Batch) -> None:
        """Raises WorkerError if a worker has ended or does not read.

        A large batch is more than a pipe holds, so a frozen worker would hold up a plain write
        for ever, before any collective could run into its timeout.
        """
        self._send_line(batch.to_json() + b"\n")

    def counts(self) -> list[list[CallCount]]:
        """Calls so far on each rank from 1 on. Raises WorkerError as `send` does."""
        self._send_line(COUNTS_REQUEST)
        deadline = time.monotonic() + SEND_DEADLINE_S
        ranks = []
        for worker in self._workers:
            answer = read_answer(worker, deadline, _MOST_COUNTS_BYTES)
            if "counts" not in answer:
                raise self._lost(worker, str(answer.get("error", answer)))
            ranks.append([_count(*fields) for fields in answer["counts"]])
        return ranks

    def _send_line(self, line: bytes) -> None:
        for worker in self._workers:
            try:
                left = write_in_time(worker.stdin.fileno(), line, SEND_DEADLINE_S)
            except OSError as error:
                raise self._lost(worker) from error
            if left:
                raise WorkerError(
                    f"tensor-parallel rank {worker.rank} (pid {worker.process.pid})",
                    f"a worker that reads its batch within {SEND_DEADLINE_S:g} s",
                    f"{left:,} of {len(line):,} bytes are unread; it is frozen",
                    "restart the server; the workers are ended",
                )

    def add_build_failures(self, error: KernelBuildError) -> None:
        """Adds to an error what other ranks cannot compile, so that all of it is left out of the
        next plan; ranks that only wait for the first have nothing to add."""
        error.others = (*error.others, *self._build_failures(GATHER_S))

    def _build_failures(self, within_s: float) -> list[KernelBuildError]:
        answers = self._answers(within_s).items()
        return [found for rank, said in answers if (found := failure_in(said, rank)) is not None]

    def _answers(self, within_s: float) -> dict[int, dict[str, Any]]:
        deadline = time.monotonic() + within_s
        return {worker.rank: read_answer(worker, deadline) for worker in self._workers}

    def explain(self, error: Exception) -> HalError:
        """Turns a failed collective into an error that names the rank that is gone: WorkerError, or
        KernelBuildError where that is why."""
        # A rank says so before it ends, and others may end of its end: it is asked first.
        answers = self._answers(0.0)
        said = answers.items()
        failures = [found for rank, answer in said if (found := failure_in(answer, rank))]
        if failures:
            failures[0].others = tuple(failures[1:])
            return failures[0]
        gone = self._gone_within(1.0, answers)
        if gone is not None:
            return gone
        ranks = ", ".join(str(worker.rank) for worker in self._workers)
        return WorkerError(
            "tensor-parallel group",
            "every rank to take part in each collective in time",
            f"ranks {ranks} run but at least one does not answer ({_first_line(error)})",
            "restart the server; the workers are ended",
        )

    def _gone_within(self, within_s: float, answers: dict[int, dict[str, Any]]) -> HalError | None:
        """The rank that ended, closed its output or told an error. None if there is none.

        One that told an error may only have lost its peer, so one that told nothing comes first.
        answers: of all ranks until now; those of ranks that end meanwhile take their place.
        """
        told: WorkerError | None = None
        # A dying process closes its connections a little before it can be seen as ended.
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for worker in self._workers:
                has_ended = worker.process.poll() is not None
                if has_ended and answers[worker.rank].get("state") != "failed":
                    answers[worker.rank] = read_answer(worker, 0.0)
                answer = answers[worker.rank]
                failure = failure_in(answer, worker.rank)
                if failure is not None:
                    return failure
                if answer.get("state") == "failed":
                    told = told or _gone(worker, f"it failed: {answer.get('error')}")
                elif has_ended or answer.get("error") == CLOSED_OUTPUT:
                    return self._lost(worker, CLOSED_OUTPUT)
            if told is not None:
                deadline = min(deadline, time.monotonic() + PEER_END_S)
            time.sleep(0.02)
        return told

    def _lost(self, worker: Worker, if_it_runs: str = "it closed its input") -> WorkerError:
        try:
            code = worker.process.wait(timeout=1.0)
            found = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            found = if_it_runs
        return _gone(worker, found)

    def stop(self) -> None:
        """Ends every worker: by closing its input, then by force."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.stdin.close()
        deadline = time.monotonic() + STOP_DEADLINE_S
        for worker in self._workers:
            try:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
            worker.stdout.close()


def _gone(worker: Worker, found: str) -> WorkerError:
    return WorkerError(
        f"tensor-parallel rank {worker.rank} (pid {worker.process.pid})",
        "a running worker",
        found,
        "restart the server; its standard error tells more",
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _count(
    site: str, op: str, phase: str, implementation: str, tier: str, tokens: list[int], calls: int
) -> CallCount:
    """A row of counters as it came through JSON."""
    return CallCount(
        site=site,
        op=op,
        phase=phase,
        implementation=implementation,
        tier=tier,
        tokens=TokenRange(*tokens),
        calls=calls,
    )


def start_workers(
    order: WorkerOrder, world_size: int, rendezvous: str, num_blocks: int, plan_hash: str
) -> Workers:
    """Starts ranks 1 … world_size-1; they begin to plan and load at once."""
    workers = []
    for rank in range(1, world_size):
        process = subprocess.Popen(
            [sys.executable, "-m", "hal_engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        if process.stdin is None or process.stdout is None:
            raise WorkerError(f"rank {rank}", "pipes to the worker", "none", "report it")
        first = {
            **asdict(order),
            "rank": rank,
            "world_size": world_size,
            "rendezvous": rendezvous,
            "num_blocks": num_blocks,
            "plan_hash": plan_hash,
        }
        process.stdin.write(json.dumps(first).encode() + b"\n")
        process.stdin.flush()
        os.set_blocking(process.stdin.fileno(), False)  # see Workers.send
        workers.append(Worker(rank, process, process.stdin, process.stdout))
    return Workers(workers)


class TensorParallelRunner:
    """A `ModelRunner` whose batches run on all ranks."""

    def __init__(self, local: LocalRunner, workers: Workers, group: CollectiveGroup) -> None:
        self._local = local
        self._workers = workers
        self._group = group

    @property
    def block_size(self) -> int:
        return self._local.block_size

    @property
    def num_blocks(self) -> int:
        return self._local.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._local.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def supports_embeddings(self) -> bool:
        return self._local.supports_embeddings

    @property
    def worker_process_ids(self) -> list[int]:
        return self._workers.process_ids

    def worker_counts(self) -> list[list[CallCount]]:
        """Calls so far on each rank from 1 on. Raises WorkerError."""
        return self._workers.counts()

    def execute(self, batch: Batch) -> torch.Tensor:
        """See `ModelRunner.execute`. Raises WorkerError if a rank is gone or frozen, and
        KernelBuildError, with all ranks' failures, if one cannot compile a kernel."""
        self._workers.send(batch)
        try:
            return self._execute_here(batch)
        except KernelBuildError as error:
            self._workers.add_build_failures(error)
            raise

    def _execute_here(self, batch: Batch) -> torch.Tensor:
        try:
            logits = self._local.execute(batch)
            self._group.check()
            return logits
        except RuntimeError as error:  # what gloo raises for a lost peer and for a timeout
            raise self._workers.explain(error) from error

    def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._local.embed(token_ids)

    def top_k_top_p(
        self, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        return self._local.top_k_top_p(logits, top_k, top_p)

    def close(self) -> None:
        self._workers.stop()
        self._group.close()
        self._local.close()
