"""Workers that say nothing, half a line or no more: errors in time that name the rank, no leaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hal.errors import KernelBuildError
from hal_engine import building, worker_pipes
from hal_engine import workers as worker_groups
from hal_engine.worker_pipes import CLOSED_OUTPUT, Worker, read_answer
from hal_engine.workers import WorkerError, Workers

PLANNED = '{"state": "planned"}\n'
FAILED = '{"build_failure": {"who": "k for norm.rms", "required": "", "found": ""}}\n'
TOLD = '{"state": "failed", "error": "RuntimeError: a peer is gone"}\n'
LIVES, CLOSES, ENDS = "time.sleep(100)", "os.close(1); time.sleep(100)", ""
PROMPT_S = 5.0  # for what takes no second, on a machine that has more to do

Started = Callable[[str, str], Worker]


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts a process in a worker's place that says something and then does something."""
    workers: list[Worker] = []

    def start(says: str, then: str) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os, time; os.write(1, {says.encode()!r}); {then}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        workers.append(Worker(len(workers) + 1, process, process.stdin, process.stdout))
        return workers[-1]

    yield start
    for worker in workers:
        with worker.process:
            worker.process.kill()


def soon() -> float:
    return time.monotonic() + 60.0


def wait_for_output(worker: Worker) -> None:
    """Until its first bytes are there; they are kept."""
    assert worker.stdout.fileno() >= 0
    while not worker.unread:
        worker.unread += os.read(worker.stdout.fileno(), 1 << 16)


def test_lines_that_come_together_are_answers_one_by_one(started: Started) -> None:
    """The second is not waited for: it has been read with the first."""
    worker = started(PLANNED + TOLD, LIVES)
    wait_for_output(worker)
    assert read_answer(worker, 0.0) == json.loads(PLANNED)
    assert read_answer(worker, 0.0) == json.loads(TOLD)
    assert read_answer(worker, 0.0) == {"error": "no answer in time"}


def test_a_line_longer_than_a_pipe_holds_is_whole(started: Started) -> None:
    long = json.dumps({"counts": "x" * 300_000})
    script = f"[os.write(1, b'x' * 1000) for _ in range(300)]; os.write(1, {long[-2:]!r}.encode())"
    worker = started('{"counts": "', script)
    assert read_answer(worker, soon(), 1 << 20) == json.loads(long)
    cut = started("x" * 5000, LIVES)
    assert read_answer(cut, soon(), 1000) == {"error": f"it said {b'x' * 200!r}"}


def test_a_worker_frozen_within_a_line_is_waited_for_until_the_deadline(started: Started) -> None:
    worker = started('{"state": "pla', "time.sleep(1.5); os.write(1, b'nned\"}\\n'); " + LIVES)
    wait_for_output(worker)
    began = time.monotonic()
    answer = read_answer(worker, began + 0.2)
    assert 0.2 <= time.monotonic() - began < 1.2
    assert "no answer in time, but" in answer["error"]
    assert '{"state": "pla' in answer["error"]
    assert read_answer(worker, soon()) == {"state": "planned"}  # had it only been slow


def test_a_worker_that_closes_its_output_and_lives_is_named(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = started("", CLOSES)
    began = time.monotonic()
    assert read_answer(worker, began + 2.0) == {"error": CLOSED_OUTPUT}
    assert 1.9 <= time.monotonic() - began < 2.0 + PROMPT_S
    assert read_answer(worker, 0.0) == {"error": CLOSED_OUTPUT}
    workers = Workers([worker])
    found = workers.explain(RuntimeError("a collective"))
    assert isinstance(found, WorkerError)
    assert "rank 1" in found.who
    assert found.found == CLOSED_OUTPUT
    monkeypatch.setattr(worker_pipes, "_MOST_END_S", 0.2)  # not the time that a start may take
    for ask in (lambda: workers.wait_until("ready"), workers.counts):
        with pytest.raises(WorkerError, match=CLOSED_OUTPUT) as raised:
            ask()
        assert "rank 1" in raised.value.who


def test_how_a_worker_ended_is_said(started: Started) -> None:
    assert read_answer(started("", "os._exit(7)"), soon()) == {"error": "it ended with exit code 7"}


@pytest.mark.parametrize("first", [CLOSES, LIVES], ids=["closed", "frozen"])
def test_other_ranks_failures_are_gathered_past_one_that_says_nothing(
    started: Started, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr(worker_groups, "GATHER_S", 1.0)
    half = "" if first == CLOSES else FAILED[:20]
    workers = [started(half, first), started(FAILED, ENDS)]
    workers[1].process.wait(60)
    error = KernelBuildError("r for rope", "code", "none", "report it")
    began = time.monotonic()
    Workers(workers).add_build_failures(error)
    assert time.monotonic() - began < 1.0 + PROMPT_S
    assert [other.who for other in error.others] == ["k for norm.rms on rank 2"]


def test_a_rank_that_was_ended_is_named_before_one_that_lost_its_peer(started: Started) -> None:
    """The second of three is killed; the first tells of it, and ends first."""
    told, killed = started(TOLD, ENDS), started("", LIVES)
    told.process.wait(60)
    killed.process.send_signal(signal.SIGKILL)
    found = Workers([told, killed]).explain(RuntimeError("connection reset"))
    assert "rank 2" in found.who
    assert found.found == "ended by signal 9"
    alone = Workers([started(TOLD, ENDS), started("", LIVES)])
    found = alone.explain(RuntimeError("connection reset"))
    assert "rank 3" in found.who
    assert found.found == "it failed: RuntimeError: a peer is gone"


@pytest.mark.parametrize("breaks", [False, True], ids=["gathered", "gathering breaks"])
def test_a_start_that_fails_leaves_no_worker(
    started: Started, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """Rank 0 of four cannot compile; the others closed, failed too and froze."""
    monkeypatch.setattr(worker_groups, "STOP_DEADLINE_S", 0.3)
    ranks = [
        started(PLANNED, CLOSES),
        started(PLANNED + FAILED, ENDS),
        started(PLANNED + FAILED[:9], LIVES),
    ]
    closed: list[str] = []
    group = SimpleNamespace(close=lambda: closed.append("group"))
    runtime = SimpleNamespace(free_memory_bytes=lambda: 0, create_group=lambda *_: group)
    error = KernelBuildError("r for rope", "code", "none", "report it")

    def build_rank(*_: Any, **__: Any) -> Any:
        raise error

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(building, "check_runnable_on", lambda _: None)
    monkeypatch.setattr(building, "choose_num_blocks", lambda *_: 1)
    monkeypatch.setattr(building, "start_workers", lambda *_: Workers(ranks))
    monkeypatch.setattr(building, "build_rank", build_rank)
    if breaks:
        monkeypatch.setattr(Workers, "add_build_failures", broken)
    planned: Any = SimpleNamespace(
        device=None, options=SimpleNamespace(tp=4), plan=SimpleNamespace(hash="")
    )
    registry: Any = SimpleNamespace(create_runtime=lambda _: runtime)
    with pytest.raises(ZeroDivisionError if breaks else KernelBuildError) as raised:
        building.build_runner(planned, registry, SimpleNamespace())  # type: ignore[arg-type]
    assert breaks or raised.value is error
    assert [other.who for other in error.others] == [] if breaks else ["k for norm.rms on rank 2"]
    assert closed == ["group"]
    assert all(rank.process.returncode is not None for rank in ranks)


def test_a_rank_that_does_not_come_to_the_rendezvous_is_named(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_groups, "STOP_DEADLINE_S", 0.3)
    ranks = [started(PLANNED + TOLD, ENDS), started(PLANNED, LIVES)]

    def missed(*_: Any) -> Any:
        ranks[0].process.wait(60)
        raise RuntimeError("Wait timeout")

    runtime = SimpleNamespace(free_memory_bytes=lambda: 0, create_group=missed)
    monkeypatch.setattr(building, "check_runnable_on", lambda _: None)
    monkeypatch.setattr(building, "choose_num_blocks", lambda *_: 1)
    monkeypatch.setattr(building, "start_workers", lambda *_: Workers(ranks))
    planned: Any = SimpleNamespace(
        device=None, options=SimpleNamespace(tp=3), plan=SimpleNamespace(hash="")
    )
    registry: Any = SimpleNamespace(create_runtime=lambda _: runtime)
    with pytest.raises(WorkerError, match="a peer is gone") as raised:
        building.build_runner(planned, registry, SimpleNamespace())  # type: ignore[arg-type]
    assert "rank 1" in raised.value.who
    assert all(rank.process.returncode is not None for rank in ranks)


BYSTANDER = """
import sys, threading, time
from types import SimpleNamespace
from hal_engine import worker
def execute(batch):
    raise {error}
def build(order, channel):
    threading.Thread(target=time.sleep, args=(300,)).start()  # as gloo waits for a peer
    return SimpleNamespace(execute=execute), None, None
worker._build = build
worker.run_process()
"""


@pytest.mark.parametrize(
    "error", ["RuntimeError('a peer is gone')", "SystemExit(0)", "MemoryError"]
)
def test_a_worker_tells_any_error_and_ends_without_teardown(error: str) -> None:
    batch = b"[[], []]\n"
    done = subprocess.run(
        [sys.executable, "-c", BYSTANDER.format(error=error)],
        input=b"{}\n" + batch, capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    ready, said = (json.loads(line) for line in done.stdout.splitlines())
    assert ready == {"state": "ready"}
    assert said["state"] == "failed"
    assert said["error"].startswith(error.partition("(")[0])
    assert done.returncode == 1
    assert b"Traceback" in done.stderr


def test_an_order_that_is_none_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hal_engine.worker"],
        input=b"no JSON\n", capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["error"].startswith("JSONDecodeError")
    assert done.returncode == 1
