"""Counters are totals: what threads and child processes call is counted, each call once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hal
from observed import calls_of, observe


def multiply(times: int) -> None:
    """So many products and sums."""
    a = torch.ones(2, 2)
    for _ in range(times):
        torch.mm(a, a)
        with torch.no_grad():
            a + a
    with torch.inference_mode():
        for _ in range(times):
            torch.matmul(a, a)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plain=st.lists(st.integers(0, 6), max_size=5),
    pooled=st.lists(st.integers(0, 6), max_size=8),
    own=st.integers(0, 6),
)
def test_threads(plain: list[int], pooled: list[int], own: int) -> None:
    def program() -> None:
        threads = [threading.Thread(target=multiply, args=(times,)) for times in plain]
        for thread in threads:
            thread.start()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(multiply, pooled))
        multiply(own)
        for thread in threads:
            thread.join()

    trace = observe(program)
    total = sum(plain) + sum(pooled) + own
    assert calls_of(trace)["mm"] == 2 * total
    assert calls_of(trace)["add"] == total
    assert sum(call.calls for call in trace.functions if call.name == "mm") == total
    assert sum(call.calls for call in trace.functions if call.name == "matmul") == total
    assert calls_of(observe(lambda: multiply(2)))["mm"] == 4


@pytest.mark.timeout(1200)  # two children import torch, which takes minutes on a busy machine
def test_every_way_of_having_children() -> None:
    torch.set_num_threads(torch.get_num_threads())
    with hal.audit() as report:
        multiply(2)
        for kind in ("fork", "spawn"):
            child = multiprocessing.get_context(kind).Process(target=multiply, args=(3,))
            child.start()
            child.join()
            assert child.exitcode == 0
        pid = os.fork()
        if pid == 0:
            multiply(5)
            os._exit(0)
        os.waitpid(pid, 0)
        code = "import torch\nfor _ in range(7): torch.mm(torch.ones(2, 2), torch.ones(2, 2))"
        environment = os.environ | {"RANK": "3"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=600)
        subprocess.run([sys.executable, "-c", "print(end='')"], check=True, timeout=600)
        killed = multiprocessing.get_context("fork").Process(target=_die)
        killed.start()
        killed.join()
    trace = report.trace
    assert calls_of(trace)["mm"] == 2 * (2 + 3 + 3 + 5) + 7, report.result.notes
    assert trace.processes == report.result.processes == 5
    assert {op.rank for op in trace.ops} == {0, 3}
    for op in trace.ops:
        assert op.call is None or trace.functions[op.call].leaves.get(op.name, 1)
    assert any(
        note.startswith("1 child processes were not heard of") for note in report.result.notes
    )


def test_a_fork_while_another_thread_is_counting() -> None:
    """Its child has none of the parent's threads, and must not wait for what they hold."""
    holding, done = threading.Event(), threading.Event()
    with hal.audit() as report:
        multiply(1)
        side = report._session._torch
        assert side is not None

        def hold() -> None:
            with side.observer.storages._lock, side._module_lock, side._steps._lock:
                holding.set()
                done.wait(100)

        thread = threading.Thread(target=hold)
        thread.start()
        holding.wait(100)
        pid = os.fork()
        if pid == 0:
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
            os._exit(0)
        ended = 0
        for _ in range(1000):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            done.wait(0.1)
        done.set()
        thread.join()
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert ended == pid
    assert calls_of(report.trace)["addmm"] == 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reduce(rank: int, file: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    for _ in range(3):
        torch.distributed.all_reduce(torch.ones(4))
    torch.distributed.destroy_process_group()


def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    with hal.audit() as report:
        torch.multiprocessing.spawn(_reduce, args=(str(tmp_path / "meeting"),), nprocs=2)
    reductions = [op for op in report.trace.ops if op.op_class == "collective"]
    assert {(op.rank, op.calls, op.values["backend"]) for op in reductions} == {
        (0, 3, "gloo"),
        (1, 3, "gloo"),
    }
    assert {op.function for op in reductions} == {"all_reduce"}
    (row,) = [row for row in report.result.rows if row.op == "collective"]
    assert row.calls == 6
    assert any(note.startswith("rows are sums over ranks 0, 1;") for note in report.result.notes)


def test_sitecustomize_of_the_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.was_customised = True\n")
    code = "import sys; assert sys.was_customised; print(sys.path, sys.modules['sitecustomize'])"
    with hal.audit():
        path = os.pathsep.join((os.environ["PYTHONPATH"], str(tmp_path)))
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    assert "child_startup" not in done.stdout
    assert str(tmp_path) in done.stdout


def test_threads_from_before_are_named() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="an older thread")
    thread.start()
    try:
        with hal.audit() as report:
            torch.ones(1)
    finally:
        stop.set()
        thread.join()
    assert any("an older thread" in note for note in report.result.notes)


def test_thread_that_outlives_the_audit() -> None:
    begun, stop = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def outlive() -> None:
        begun.set()
        stop.wait(60)
        results.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)))

    thread = threading.Thread(target=outlive)
    with hal.audit() as report:
        thread.start()
        begun.wait(60)
    stop.set()
    thread.join()
    assert torch.equal(results[0], torch.full((2, 2), 2.0))
    assert calls_of(report.trace)["mm"] == 0
