"""Several ranks: the same tokens, errors instead of hangs, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import greedy_oracle
import tiny_models
from greedy_oracle import GreedyOracle, complete
from hal.plugins.manager import load_backends
from hal.waivers import WaiverBook
from hal_backends.torch_group import TorchGroup
from hal_engine import worker_pipes
from hal_engine import workers as worker_groups
from hal_engine.api import EngineDeadError, GenerationRequest, SamplingParams
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.building import build_runner
from hal_engine.engine_loop import Engine
from hal_engine.options import EngineOptions
from hal_engine.planning import plan_model
from hal_engine.serving import open_engine
from hal_engine.worker_starting import WorkerOrder, start_workers
from hal_engine.workers import WorkerError, Workers

LOST_DEADLINE_S = 15.0  # from the loss of a worker to the error at the client
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "num_blocks": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GreedyOracle]:
    """Six heads in three key-value groups: two ranks hold unequal shares, three hold equal ones."""
    folder = tmp_path_factory.mktemp("three-groups")
    seed = torch.seed() % 2**31
    model = tiny_models.make_tiny_model("llama", folder, seed=seed, num_heads=6, num_kv_heads=3)
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(3 * i + 1)] for i in range(32)
    ]
    continuations = greedy_oracle.greedy(
        model.oracle, prompts, greedy_oracle.NUM_NEW_TOKENS, batch=32
    )
    return folder, GreedyOracle(model.oracle, prompts, continuations)


def workers_of_this_process() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "hal_engine.worker" in " ".join(child.cmdline())
    ]


@contextlib.contextmanager
def running(folder: Path, tp: int, **options: Any) -> Iterator[tuple[Engine, list[psutil.Process]]]:
    """An engine over `tp` ranks; afterwards no worker may be left."""
    engine = open_engine(folder, tp=tp, **{**OPTIONS, **options})
    workers = workers_of_this_process()
    try:
        assert len(workers) == tp - 1
        yield engine, workers
    finally:
        for worker in workers:
            if worker.is_running() and worker.status() == psutil.STATUS_STOPPED:
                worker.resume()  # only on a failed test
        asyncio.run(engine.close())
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert not workers_of_this_process()


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.long)])
def test_same_tokens(oracle: tuple[Path, GreedyOracle], tp: int) -> None:
    folder, expected = oracle
    before = set(glob.glob(f"{tempfile.gettempdir()}/halstack-*"))
    with running(folder, tp) as (engine, workers):
        _listens_on_loopback_only([psutil.Process(), *workers])
        assert expected.check(complete(engine, expected.prompts)) <= 1, expected.ties
        counts = {c.site: c.calls for c in engine.op_calls() if c.op.startswith("collective")}
    steps = counts["layers.0.o_all_reduce"]
    assert steps > greedy_oracle.NUM_NEW_TOKENS
    assert {c for site, c in counts.items() if "all_reduce" in site} == {steps}
    assert 0 < counts["lm_head_all_gather"] <= steps
    assert set(glob.glob(f"{tempfile.gettempdir()}/halstack-*")) == before


def _listens_on_loopback_only(processes: list[psutil.Process]) -> None:
    """By the kernel's tables: whatever these processes listen on is a loopback address."""
    inodes = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}/fd")
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                inodes.add(os.readlink(entry))
    listening = []
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: LISTEN
                listening.append((fields[1].partition(":")[0], loopback))
    assert listening, "the ranks must have met over some socket"
    assert all(address == loopback for address, loopback in listening), listening


def _request(number: int, ids: list[int], max_tokens: int = 300) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"lost-{number}",
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def _lose(engine: Engine, worker: psutil.Process, how: int, prompts: list[Any]) -> float:
    """Streams, signals the worker after the first tokens; seconds until every stream has ended."""
    started = asyncio.Event()
    lost_at = 0.0

    async def stream(number: int, ids: list[int]) -> Any:
        last = None
        async for event in engine.generate(_request(number, ids)):
            last = event
            if event.num_generated_tokens > 3:
                started.set()
        return last

    tasks = [asyncio.create_task(stream(i, ids)) for i, ids in enumerate(prompts)]
    await asyncio.wait_for(started.wait(), 60)
    lost_at = time.monotonic()
    worker.send_signal(how)
    for event in await asyncio.wait_for(asyncio.gather(*tasks), 60):
        assert event.finish_reason == "error"
        assert "rank" in event.error
        assert "restart" in event.error
    waited = time.monotonic() - lost_at
    with pytest.raises(EngineDeadError, match="rank"):
        await anext(engine.generate(_request(99, prompts[0])))
    return waited


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_worker_is_an_error_in_time(
    oracle: tuple[Path, GreedyOracle], how: signal.Signals
) -> None:
    folder, expected = oracle
    with running(folder, 2) as (engine, workers):
        waited = asyncio.run(_lose(engine, workers[0], how, expected.prompts[:3]))
        assert waited < LOST_DEADLINE_S
        # The engine ends its workers by itself, without waiting for close().
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive


class _Frozen(subprocess.Popen[bytes]):
    """In a worker's place: a process that reads nothing, as a stopped one does not."""

    def __init__(self, _: Any, **options: Any) -> None:
        super().__init__([sys.executable, "-c", "import time; time.sleep(100)"], **options)


def test_a_batch_that_a_frozen_worker_does_not_read_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More bytes than a pipe holds: long block tables of many sequences are that large."""
    monkeypatch.setattr(worker_groups, "SEND_DEADLINE_S", 0.5)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", _Frozen)
        order = WorkerOrder(model="", options={}, use={}, waivers="")
        workers = start_workers(order, 2, "", 1, "")
    try:
        batch = Batch(decode=[ScheduledSequence(i, [1], 1, [1] * 4096, "last") for i in range(64)])
        assert len(batch.to_json()) > 2**18
        began = time.monotonic()
        with pytest.raises(WorkerError, match="unread; it is frozen"):
            workers.send(batch)
        assert time.monotonic() - began < 10
    finally:
        for pid in workers.process_ids:
            os.kill(pid, signal.SIGKILL)
        workers.stop()


@pytest.mark.parametrize("said", ["no JSON", "[1]", '{"state": '])
def test_an_answer_of_a_worker_that_is_none_is_named(said: str) -> None:
    process = subprocess.Popen(["echo", said], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    worker = worker_pipes.Worker(1, process, process.stdin, process.stdout)
    workers = Workers([worker])
    try:
        with pytest.raises(WorkerError) as raised:
            workers.wait_until("planned")
    finally:
        workers.stop()
    assert "rank 1" in raised.value.who
    assert said in raised.value.found


def test_what_a_collective_could_not_raise_ends_the_step(
    oracle: tuple[Path, GreedyOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on a device cannot raise that a rank did not come; the group is asked each step."""
    registry = load_backends()
    options = EngineOptions(**OPTIONS, tp=2)
    planned = plan_model(oracle[0], options, registry, WaiverBook(), {}, must_run=True)
    order = WorkerOrder(
        model=str(oracle[0]), options=options.model_dump(mode="json"), use={}, waivers=""
    )
    runner, _ = build_runner(planned, registry, order)
    try:
        batch = Batch(prefill=[ScheduledSequence(1, [3, 4, 5], 0, [0], "last")])
        runner.execute(batch)

        def missing(_: TorchGroup) -> None:
            raise RuntimeError("required rank 1 to come")

        monkeypatch.setattr(TorchGroup, "check", missing)
        with pytest.raises(WorkerError, match="required rank 1 to come"):
            runner.execute(batch)
    finally:
        runner.close()


def test_a_worker_lost_while_idle_fails_the_next_request(
    oracle: tuple[Path, GreedyOracle],
) -> None:
    folder, expected = oracle
    with running(folder, 2) as (engine, workers):
        workers[0].kill()
        while workers[0].status() != psutil.STATUS_ZOMBIE:  # reaping it is the engine's business
            time.sleep(0.01)
        began = time.monotonic()
        completion = complete(engine, expected.prompts[:1])[0]
        assert time.monotonic() - began < LOST_DEADLINE_S
        assert completion.finish_reason == "error"
        assert completion.error is not None
        assert "signal 9" in completion.error


def test_a_worker_with_another_plan_is_refused(oracle: tuple[Path, GreedyOracle]) -> None:
    """The order names other explicit choices than rank 0 planned with: the hashes differ."""
    folder, _ = oracle
    registry = load_backends()
    planned = plan_model(folder, EngineOptions(tp=2, **OPTIONS), registry, WaiverBook())
    other = "reference.attention"
    assert other not in {op.choice.name for op in planned.plan.ops}
    order = WorkerOrder(
        model=str(planned.config.source),
        options=planned.options.model_dump(mode="json"),
        use={"attention.decode": other},
        waivers="",
    )
    began = time.monotonic()
    with pytest.raises(WorkerError, match=planned.plan.hash):
        build_runner(planned, registry, order)
    assert time.monotonic() - began < 60
    assert not workers_of_this_process()


def test_workers_end_with_their_engine(oracle: tuple[Path, GreedyOracle]) -> None:
    """Rank 0 killed outright, in the middle of a generation: no orphan keeps running."""
    folder, _ = oracle
    script = (
        "import sys\n"
        "from hal_engine.serving import open_engine\n"
        "from greedy_oracle import complete\n"
        f"engine = open_engine({str(folder)!r}, tp=2, **{OPTIONS!r})\n"
        "print('running', flush=True)\n"
        "while True:\n"
        "    complete(engine, [[5, 6, 7]], count=200)\n"
    )
    with psutil.Popen(
        [sys.executable, "-c", script],
        stdout=-1,
        env={**os.environ, "PYTHONPATH": str(Path(greedy_oracle.__file__).parent)},
    ) as process:
        assert process.stdout.readline() == b"running\n"
        workers = [c for c in process.children() if "hal_engine.worker" in " ".join(c.cmdline())]
        assert len(workers) == 1
        time.sleep(0.5)
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=LOST_DEADLINE_S)
    assert not alive
