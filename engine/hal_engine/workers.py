"""The processes of ranks 1 and above, as rank 0 sees them: what is sent, what they say, their end.

A worker that dies breaks its connections at once; one that freezes neither reads nor answers. Each
wait here has its limit, and what went wrong is an error that names the rank.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from typing import Any, Literal

from hal.binding import CallCount
from hal.errors import HalError, KernelBuildError
from hal.ops.request import TokenRange
from hal_engine.batch import Batch
from hal_engine.child_processes import end_child
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
        """Ends every worker: by closing its input, then by force. Each gets its turn whatever
        becomes of the others. Raises WorkerError for those that outlive even that."""
        for worker in self._workers:
            with contextlib.suppress(OSError):  # all are told before the first is waited for
                worker.stdin.close()
        deadline = time.monotonic() + STOP_DEADLINE_S
        left = [
            worker
            for worker in self._workers
            if not end_child(worker.process, deadline - time.monotonic())
        ]
        if left:
            raise WorkerError(
                "tensor-parallel ranks " + ", ".join(str(worker.rank) for worker in left),
                "workers that end when they are killed",
                "processes " + ", ".join(str(worker.process.pid) for worker in left) + " do not",
                "they are stuck inside the kernel: see `ps -o pid,stat,wchan` and the kernel's log",
            )


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
