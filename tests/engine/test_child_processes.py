"""Children of the engine: each is ended whatever it does, each wait has its limit, none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import tiny_models
from hal_engine import child_processes, serving, worker_starting
from hal_engine import workers as worker_groups
from hal_engine.child_processes import end_child
from hal_engine.serving import open_engine
from hal_engine.tensor_parallel import TensorParallelRunner
from hal_engine.worker_pipes import Worker, write_in_time
from hal_engine.worker_starting import WorkerOrder, start_workers
from hal_engine.workers import WorkerError, Workers

PROMPT_S = 5.0  # for what takes no second, on a machine that has more to do
READS = "sys.stdin.read()"
SLEEPS = "time.sleep(100)"
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(); time.sleep(100)"
HAS_CHILD = "say(subprocess.Popen(['sleep', '100']).pid); time.sleep(100)"
PRELUDE = (
    "import os, signal, subprocess, sys, time\n"
    "def say(what=0): os.write(1, b'%d\\n' % what)\n"
)  # fmt: skip

Start = Callable[[str], subprocess.Popen[bytes]]
_popen = subprocess.Popen  # tests put others in its place


def start_child(script: str) -> subprocess.Popen[bytes]:
    return _popen(
        [sys.executable, "-c", PRELUDE + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def start_one(script: str) -> subprocess.Popen[bytes]:
        children.append(start_child(script))
        return children[-1]

    yield start_one
    for child in children:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(60)


def worker_of(rank: int, child: subprocess.Popen[bytes]) -> Worker:
    assert child.stdin is not None
    assert child.stdout is not None
    return Worker(rank, child, child.stdin, child.stdout)


def said(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def test_a_child_that_reads_its_input_ends_by_itself(start: Start) -> None:
    child = start(READS)
    assert end_child(child, 60.0)
    assert child.returncode == 0
    assert child.stdout is not None
    assert child.stdout.closed


@pytest.mark.parametrize("within_s", [0.0, 0.3])
def test_one_that_does_not_is_killed_with_what_it_started(start: Start, within_s: float) -> None:
    child, grandparent = start(IGNORES), start(HAS_CHILD)
    said(child)
    grandchild = psutil.Process(said(grandparent))
    began = time.monotonic()
    assert end_child(child, within_s)
    assert end_child(grandparent, within_s)
    assert time.monotonic() - began < 2 * within_s + PROMPT_S
    assert child.returncode == grandparent.returncode == -signal.SIGKILL
    assert not psutil.wait_procs([grandchild], timeout=60)[1]


def test_one_that_has_ended_is_not_waited_for(start: Start) -> None:
    child = start("")
    child.wait(60)
    assert end_child(child, 0.0)
    assert end_child(child, 0.0)  # again: nothing is killed, whose number its may be by now


def test_one_that_outlives_its_kill_is_told_in_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process does that is stuck inside the kernel."""
    monkeypatch.setattr(child_processes, "KILLED_DEADLINE_S", 0.3)
    child = start(SLEEPS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda *_: None)
        began = time.monotonic()
        assert not end_child(child, 0.1)
        assert time.monotonic() - began < 0.4 + PROMPT_S
    assert end_child(child, 0.0)


def test_every_worker_is_ended_though_one_cannot_be(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "KILLED_DEADLINE_S", 0.3)
    monkeypatch.setattr(worker_groups, "STOP_DEADLINE_S", 0.2)
    children = [start(SLEEPS) for _ in range(3)]
    kill, stuck = os.killpg, children[0].pid
    workers = Workers([worker_of(rank, child) for rank, child in enumerate(children, 1)])
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda pid, how: pid == stuck or kill(pid, how))
        with pytest.raises(WorkerError, match="ranks 1\n") as raised:
            workers.stop()
    assert str(stuck) in raised.value.found
    assert [child.returncode for child in children] == [None, -signal.SIGKILL, -signal.SIGKILL]


def test_a_reader_of_a_byte_now_and_then_is_not_in_time() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    drip = "import os, time\nwhile True: os.read(0, 4096); time.sleep(0.05)"
    child = subprocess.Popen([sys.executable, "-c", drip], stdin=reading)
    os.close(reading)
    try:
        began = time.monotonic()
        assert write_in_time(writing, b"x" * (64 << 20), 1.0) > 0
        assert time.monotonic() - began < 1.0 + PROMPT_S
    finally:
        os.close(writing)
        child.kill()
        child.wait(60)


ORDER = WorkerOrder(model="", options={}, use={}, waivers="")


class _Starts:
    """In Popen's place: the n-th worker runs the n-th script; None is a process that cannot be
    started."""

    def __init__(self, *scripts: str | None) -> None:
        self._scripts = list(scripts)
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, *_: Any, **__: Any) -> subprocess.Popen[bytes]:
        script = self._scripts[len(self.children)]
        if script is None:
            raise OSError(11, "Resource temporarily unavailable")
        self.children.append(start_child(script))
        return self.children[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Starts]:
    monkeypatch.setattr(worker_groups, "STOP_DEADLINE_S", 0.3)
    monkeypatch.setattr(worker_starting, "ORDER_DEADLINE_S", 0.5)

    def patch(*scripts: str | None) -> _Starts:
        made = _Starts(*scripts)
        monkeypatch.setattr(subprocess, "Popen", made)
        return made

    return patch


def test_a_rank_that_cannot_be_started_leaves_none_of_the_others(
    starts: Callable[..., _Starts],
) -> None:
    made = starts(SLEEPS, READS, None)
    with pytest.raises(OSError, match="temporarily unavailable"):
        start_workers(ORDER, 4, "", 1, "")
    assert [child.returncode is None for child in made.children] == [False, False]


@pytest.mark.parametrize(
    ("script", "found"),
    [(SLEEPS, "bytes are unread"), ("os.close(0); say(); time.sleep(100)", "closed its input")],
    ids=["frozen", "closed"],
)
def test_an_order_that_is_not_taken_is_an_error_in_time(
    starts: Callable[..., _Starts], script: str, found: str
) -> None:
    """More bytes than a pipe holds, to the second of two ranks."""
    made = starts(READS, script)
    large = WorkerOrder(model="m" * (1 << 20), options={}, use={}, waivers="")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=found) as raised:
        start_workers(large, 3, "", 1, "")
    assert time.monotonic() - began < 1.0 + 2 * PROMPT_S
    assert "rank 2" in raised.value.who
    assert [child.returncode is None for child in made.children] == [False, False]


@pytest.mark.parametrize("fails", [{"workers"}, {"group"}, {"workers", "group", "local"}, set()])
def test_a_runner_closes_all_of_its_parts_whichever_fails(fails: set[str]) -> None:
    closed = []

    def closing(name: str) -> Callable[[], None]:
        def close() -> None:
            closed.append(name)
            if name in fails:
                raise RuntimeError(name)

        return close

    parts: list[Any] = [
        SimpleNamespace(close=closing("local")),
        SimpleNamespace(stop=closing("workers")),
        SimpleNamespace(close=closing("group")),
    ]
    runner = TensorParallelRunner(*parts)
    if fails:
        with pytest.raises(RuntimeError):
            runner.close()
    else:
        runner.close()
    assert closed == ["workers", "group", "local"]


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.make_tiny_model("llama", tmp_path, seed=torch.seed() % 2**31, num_layers=1)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def renderers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "hal_engine.chat_template_worker" in " ".join(child.cmdline())
    ]


def test_the_process_of_a_chat_template_ends_with_its_engine(folder: Path) -> None:
    before = set(renderers())
    engine = open_engine(folder, precision="fp32", num_blocks=64)
    own = set(renderers()) - before
    assert len(own) == 1
    asyncio.run(engine.close())
    assert set(renderers()) == before


def test_a_start_that_fails_leaves_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(renderers())
    seen: list[psutil.Process] = []

    def build(*_: Any, **__: Any) -> Any:
        seen.extend(set(renderers()) - before)
        raise MemoryError("no room")

    monkeypatch.setattr(serving, "build_runner", build)
    with pytest.raises(MemoryError, match="no room"):
        open_engine(folder, precision="fp32", num_blocks=64)
    assert len(seen) == 1
    assert set(renderers()) == before
