"""A kernel that some rank cannot compile: all ranks plan again without it, or the start ends."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import failing_kernels
import greedy_oracle
import tiny_models
from greedy_oracle import GreedyOracle, complete
from hal.errors import KernelBuildError, PlanError
from hal_engine import serving, workers
from hal_engine.serving import open_engine
from hal_engine.worker_pipes import Worker, failure_answer, failure_in
from hal_engine.workers import Workers

NORM, ROTATE = "cpu.norm.rms.jit", "cpu.rope_kv_write.jit"
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "num_blocks": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "tp": 2,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GreedyOracle]:
    folder = tmp_path_factory.mktemp("two-ranks")
    seed = torch.seed() % 2**31
    model = tiny_models.make_tiny_model("llama", folder, seed=seed, num_layers=1)
    rng = random.Random(seed)
    prompts = [[rng.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(3 * i + 1)] for i in (0, 5)]
    continuations = greedy_oracle.greedy(
        model.oracle, prompts, greedy_oracle.NUM_NEW_TOKENS, batch=2
    )
    return folder, GreedyOracle(model.oracle, prompts, continuations)


def no_workers_left() -> bool:
    children = psutil.Process().children(recursive=True)
    return not any("hal_engine.worker" in " ".join(child.cmdline()) for child in children)


def signed(text: str) -> str:
    """The waivers that an error proposes, signed."""
    lines = text[text.index("[[waiver]]") :].splitlines()
    kept = [line for line in lines if line.strip() == "[[waiver]]" or " = " in line]
    signed = "\n".join(kept).replace("<why this is acceptable, and until what happens>", "a test")
    return signed.replace("<who answers for it>", "the test suite") + "\n"


@pytest.mark.parametrize(
    ("here", "in_workers", "where"),
    [
        pytest.param([], [NORM], " on rank 1", id="rank 1"),
        pytest.param([NORM], [], "", id="rank 0"),
        pytest.param([NORM], [NORM], "", id="both ranks"),
    ],
)
def test_all_ranks_plan_again_and_only_with_a_waiver(
    oracle: tuple[Path, GreedyOracle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: list[str],
    in_workers: list[str],
    where: str,
) -> None:
    folder, expected = oracle
    failing_kernels.inject(monkeypatch, tmp_path, here, in_workers)
    with pytest.raises(PlanError) as raised:
        open_engine(folder, **OPTIONS)
    text = str(raised.value)
    assert f"machine code of _injected_kernel for this device{where} does not compile" in text
    assert "injected by a test" in text
    assert "reference.norm.rms is reference" in text
    cause = raised.value.__context__
    assert isinstance(cause, KernelBuildError)
    assert cause.implementation == NORM
    assert cause.who == f"{NORM} for norm.rms{where}"
    assert no_workers_left()

    waivers = tmp_path / "waivers.toml"
    waivers.write_text(signed(text), encoding="utf-8")
    engine = open_engine(folder, waivers=waivers, **OPTIONS)
    try:
        plan = engine.plan_json()
        chosen = {op["choice"] for op in plan["ops"] if op["op"] == "norm.rms"}
        assert chosen == {"reference.norm.rms"}
        (note,) = [note for note in plan["notes"] if note.startswith(f"{NORM} is left out")]
        assert f"this device{where} does not compile" in note
        assert expected.check(complete(engine, expected.prompts)) <= 1, expected.ties
    finally:
        asyncio.run(engine.close())
    assert no_workers_left()


def test_what_several_ranks_cannot_compile_is_left_out_for_all(
    oracle: tuple[Path, GreedyOracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 cannot norm and rank 1 cannot rotate: neither does either."""
    folder, expected = oracle
    failing_kernels.inject(monkeypatch, tmp_path, [NORM], [ROTATE])
    monkeypatch.setattr(workers, "GATHER_S", 60.0)  # compiling what works takes its time
    plans = []
    plain = serving.plan_without

    def plan_without(*args: Any, **options: Any) -> Any:
        plans.append(dict(args[2]))
        return plain(*args, **options)

    monkeypatch.setattr(serving, "plan_without", plan_without)
    with pytest.raises(PlanError) as raised:
        open_engine(folder, **OPTIONS)
    text = str(raised.value)
    assert [sorted(found) for found in plans] == [[NORM, ROTATE]]
    assert "on rank 1 does not compile" in plans[0][ROTATE]
    assert "on rank" not in plans[0][NORM]
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(signed(text), encoding="utf-8")
    engine = open_engine(folder, waivers=waivers, **OPTIONS)
    try:
        chosen = {op["choice"] for op in engine.plan_json()["ops"]}
        assert not chosen & {NORM, ROTATE}
        # What was joined is done in parts, which costs no tier and needs no waiver.
        assert {"reference.norm.rms", "cpu.rope.jit", "cpu.kv_write.jit"} <= chosen
        assert expected.check(complete(engine, expected.prompts)) <= 1, expected.ties
    finally:
        asyncio.run(engine.close())
    assert no_workers_left()


def test_a_kernel_that_was_left_out_and_fails_again_ends_the_start(
    oracle: tuple[Path, GreedyOracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may plan for ever."""
    failing_kernels.inject(monkeypatch, tmp_path, [NORM], [])
    monkeypatch.setattr(serving, "plan_without", lambda planned, *_, **__: planned)
    with pytest.raises(KernelBuildError, match=r"cpu\.norm\.rms\.jit for norm\.rms"):
        open_engine(oracle[0], **OPTIONS | {"tp": 1})


def test_a_failure_survives_its_way_to_rank_0() -> None:
    error = KernelBuildError("a.norm.rms.b for norm.rms", "code", "none", "report it")
    found = failure_in(failure_answer(error), 3)
    assert found is not None
    assert (found.implementation, found.where) == ("a.norm.rms.b", " on rank 3")
    assert found.who == "a.norm.rms.b for norm.rms on rank 3"
    assert (found.required, found.found, found.remedy) == ("code", "none", "report it")
    assert error.where == ""
    assert error.failures == (error,)
    for answer in ({"state": "ready"}, {"error": "x"}, {"build_failure": "x"}):
        assert failure_in(answer, 1) is None


def said_by(answers: dict[int, str]) -> Workers:
    """Workers that said that and ended."""
    workers = []
    for rank, said in answers.items():
        process = subprocess.Popen(
            [sys.executable, "-c", f"print({said!r}, end='')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.wait(60)
        workers.append(Worker(rank, process, process.stdin, process.stdout))
    return Workers(workers)


FAILED = '{"build_failure": {"who": "k for norm.rms", "required": "", "found": ""}}'


def test_the_rank_that_says_why_is_named_before_one_that_only_ended() -> None:
    """Rank 1 ended because rank 2 did; rank 2 said that it cannot compile a kernel."""
    workers = said_by({1: "", 2: FAILED, 3: FAILED})
    try:
        found = workers.explain(RuntimeError("connection reset"))
    finally:
        workers.stop()
    assert isinstance(found, KernelBuildError)
    assert [f.who for f in found.failures] == [
        "k for norm.rms on rank 2",
        "k for norm.rms on rank 3",
    ]


def test_a_kernel_that_fails_while_weights_are_read_is_no_lost_worker() -> None:
    workers = said_by({1: FAILED})
    try:
        with pytest.raises(KernelBuildError, match=r"k for norm\.rms on rank 1"):
            workers.wait_until("ready")
    finally:
        workers.stop()
