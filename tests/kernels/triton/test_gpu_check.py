"""The check for a borrowed GPU: a case for every kernel, each right on a CPU in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_cases import catalogue, running
from gpu_cases.case import Bench, Case, CaseMaker
from gpu_cases.judging import differing_bytes, error_of
from gpu_cases.launches import recorded_launches
from gpu_cases.running import Outcome, allowance, run_maker
from gpu_cases.timing import Rates

from hal_kernels.aot.catalogue import CATALOGUE

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"
MAKERS = catalogue.all_makers()
RATES = Rates(1e12, 1e14)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_every_kernel_of_the_catalogue_has_a_case() -> None:
    assert catalogue.kernels_without_a_case(MAKERS) == []
    assert catalogue.unknown_kernels(MAKERS) == []


def test_a_kernel_without_a_case_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    extended = {**CATALOGUE, "norm.new": CATALOGUE["norm.rms"]}
    monkeypatch.setattr(catalogue, "CATALOGUE", extended)
    assert catalogue.kernels_without_a_case(MAKERS) == ["norm.new"]
    kept = [maker for maker in MAKERS if "kv_write.fp4" not in maker.kernels]
    assert catalogue.kernels_without_a_case(kept) == ["kv_write.fp4", "norm.new"]
    strange = CaseMaker(name="x", kernels=("norm.old",), make=lambda bench: plain_case())
    assert catalogue.unknown_kernels([strange]) == ["norm.old"]


def test_names_are_distinct_and_each_kernel_comes_early() -> None:
    names = [maker.name for maker in MAKERS]
    assert len(set(names)) == len(names)
    seen: set[str] = set()
    last = 0
    for number, maker in enumerate(MAKERS):
        last = last if seen.issuperset(maker.kernels) else number
        seen.update(maker.kernels)
    # No case that shows nothing new stands before one that does.
    early: set[str] = set()
    for maker in MAKERS[: last + 1]:
        assert not early.issuperset(maker.kernels)
        early.update(maker.kernels)
    assert early == set(CATALOGUE)


@pytest.mark.long
@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)
def test_a_case_is_right_and_launches_what_it_says(maker: CaseMaker) -> None:
    outcome = run_maker(maker, Bench(is_dry=True), allowed_s=1.0, rates=None)
    assert outcome.failure == ""
    assert outcome.is_right, outcome
    assert set(outcome.kernels) == set(maker.kernels)


def plain_case(**fields: Any) -> Case:
    ours = fields.pop("ours", lambda: torch.tensor([1.0, 2.0]))
    exact = fields.pop("exact", lambda: torch.tensor([1.0, 2.0], dtype=torch.float64))
    return Case(name="plain", ours=ours, exact=exact, tolerance=1e-3, **fields)


def outcome_of(case: Case, *, rates: Rates | None = None, kernels: Any = ()) -> Outcome:
    maker = CaseMaker(name="made", kernels=kernels, make=lambda bench: case)
    return run_maker(maker, Bench(is_dry=True), allowed_s=0.1, rates=rates)


def test_what_is_wrong_is_said_to_be() -> None:
    assert outcome_of(plain_case()).is_right
    for found in ([1.0, 2.01], [1.0, float("nan")], [1.0, float("inf")], [1.0]):
        outcome = outcome_of(plain_case(ours=lambda found=found: torch.tensor(found)))
        assert not outcome.is_right
        assert outcome.failure == ""
    nothing = outcome_of(plain_case(ours=lambda: None, exact=lambda: None))
    assert "required as many results" in nothing.failure
    missing = outcome_of(plain_case(), kernels=("norm.rms",))
    assert "required launches of norm.rms, found none" in missing.failure


def test_a_case_that_raises_costs_only_itself() -> None:
    def broken(bench: Bench) -> Case:
        raise RuntimeError("first\nno such kernel")

    maker = CaseMaker(name="made", kernels=(), make=broken)
    outcome = run_maker(maker, Bench(is_dry=True), allowed_s=1.0, rates=None)
    assert outcome.failure == "RuntimeError: no such kernel"
    assert not outcome.is_right


def test_errors_are_of_the_row_and_integers_are_equal_or_not() -> None:
    exact = torch.tensor([[1.0, -100.0], [1e-3, 0.0]], dtype=torch.float64)
    assert error_of(exact.float(), exact) < 1e-6
    assert error_of(exact + torch.tensor([[0.5, 0.0], [0.0, 0.0]]), exact) == pytest.approx(5e-3)
    assert error_of(exact + torch.tensor([[0.0, 0.0], [1e-4, 0.0]]), exact) > 0.05
    numbers = torch.arange(4)
    assert error_of((numbers, exact), (numbers, exact)) == 0.0
    assert error_of(numbers + 1, numbers) == float("inf")
    data = torch.zeros(8, dtype=torch.uint8)
    other = data.clone()
    other[3] = 1
    assert differing_bytes(data, other) == 1 / 8


def test_launches_are_seen_and_only_meanwhile() -> None:
    maker = next(maker for maker in MAKERS if maker.kernels == ("norm.rms",))
    case = maker.make(Bench(is_dry=True))
    with recorded_launches() as launched:
        case.ours()
    assert {name for _, name in launched} == {"_rms_norm_kernel"}
    launched.clear()
    case.ours()
    assert not launched


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8]
)
def test_memory_is_filled_with_what_no_result_holds(dtype: torch.dtype) -> None:
    whole, strided = torch.zeros(3, 5, dtype=dtype), torch.zeros(5, 3, dtype=dtype).T
    for filled in (whole, strided, torch.zeros((), dtype=dtype)):
        running._spoil(filled)
        assert bool((filled.isnan() if dtype.is_floating_point else filled.abs() > 1).all())


def live(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench that takes the CPU for its GPU."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    bench = Bench(is_dry=True)
    bench.is_dry = False
    return bench


def test_free_memory_is_filled_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spoiled(size: int, device: torch.device) -> torch.Tensor:
        asked.append(size)
        return torch.empty(0, device=device)

    monkeypatch.setattr(running, "_spoiled", spoiled)
    calls = []
    case = plain_case(ours=lambda: calls.append(len(asked)) or torch.zeros(300))  # type: ignore[func-returns-value]
    running._checked_call(case, live(monkeypatch))
    assert calls == [0, len(asked)]  # one for the sizes of results, and one that is judged
    assert asked.count(1200) == asked.count(512) == asked.count(1 << 20) == 64


def test_what_a_replay_does_not_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs of which the first writes its result when it is replayed, the second nothing."""
    result = torch.zeros(2)
    replays = [lambda: result.fill_(2.0), lambda: result]
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.pop(0)())
    )
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    case = plain_case(ours=lambda: result, is_captured=True)
    found, _ = running._checked_call(case, live(monkeypatch))
    assert error_of(found, torch.full((2,), 2.0)) == 0.0
    found, _ = running._checked_call(case, live(monkeypatch))
    assert isinstance(found, torch.Tensor)
    assert found.isnan().all()


def test_a_live_device_has_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=77)
    for name, value in (
        ("get_device_capability", (9, 0)), ("get_device_name", "a device"),
        ("current_device", 0), ("get_device_properties", properties),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    bench = Bench(is_dry=False)
    assert (bench.spec.arch, bench.spec.name) == ("sm_90", "a device")
    assert bench.spec.attributes["compute_units"] == 77
    assert bench.without_units().attributes["compute_units"] == 0


def test_shares_of_the_time_that_is_left() -> None:
    makers = tuple(
        CaseMaker(name=str(share), kernels=(), make=lambda bench: plain_case(), share=share)
        for share in (1.0, 2.0, 1.0)
    )
    assert [allowance(makers, number, 8.0) for number in range(3)] == [
        2.0,
        pytest.approx(16 / 3),
        8,
    ]
    assert allowance(makers, 0, -1.0) == 0.0


def test_times_goals_and_a_library_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_times(*times: float) -> None:
        monkeypatch.setattr(running, "time_in_turns", lambda calls, seconds: times[: len(calls)])

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    of_times(10.0, 12.0)
    faster = outcome_of(plain_case(theirs=lambda: None, library="torch's"), rates=RATES)
    assert (faster.ratio, faster.goal, faster.library) == (1.2, "met", "torch's")
    of_times(10.0, 8.9)
    assert outcome_of(plain_case(theirs=lambda: None), rates=RATES).goal == "missed"
    of_times(10.0)
    # 8 MB at 1 TB/s are 8 us: 80 % of the bandwidth.
    bound = plain_case(bytes_moved=8.1e6, flops=1e6)
    found = outcome_of(bound, rates=RATES)
    assert (found.goal, found.roofline_us) == ("met", pytest.approx(8.1))
    assert outcome_of(plain_case(bytes_moved=7.9e6), rates=RATES).goal == "missed"
    assert outcome_of(plain_case(bytes_moved=1e6, flops=9e8), rates=RATES).goal == ""
    assert outcome_of(plain_case(is_timed=False), rates=RATES).ours_us is None

    def refuses() -> None:
        raise RuntimeError("not on this device")

    refused = outcome_of(plain_case(theirs=refuses, library="torch's"), rates=RATES)
    assert refused.is_right
    assert (refused.ours_us, refused.ratio) == (10.0, None)
    assert refused.library_failure == "RuntimeError: not on this device"


def test_the_script_runs_what_is_asked_for_and_keeps_it(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    ended = run_script("--dry-run", "--only", "rms norm", "--json", str(kept))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 right, 0 wrong, 0 not run" in ended.stdout
    found = json.loads(kept.read_text())
    assert found["versions"].keys() == {"python", "torch", "triton", "cuda"}
    assert found["date"].startswith(time.strftime("%Y", time.gmtime()))
    assert [case["kernels"] for case in found["cases"]] == [["norm.rms"]] * 2
    assert found["not_run"] == []
    assert f"seed {found['seed']}\n" in ended.stdout
    again = ["--dry-run", "--only", "rms norm with residual", "--json", str(kept)]
    run_script(*again, "--seed", str(found["seed"]))
    repeated = json.loads(kept.read_text())
    assert repeated["seed"] == found["seed"]
    assert repeated["cases"][0]["error"] == found["cases"][1]["error"]

    def error_of_seed(seed: int) -> float:
        run_script(*again, "--seed", str(seed))
        return float(json.loads(kept.read_text())["cases"][0]["error"])

    # Errors of rounding are few numbers: two seeds may have the same one, hardly four.
    others = (error_of_seed(found["seed"] + more) for more in (1, 2, 3))
    assert any(error != found["cases"][1]["error"] for error in others)


def test_what_cannot_be_meant_is_refused_before_the_work(tmp_path: Path) -> None:
    ended = run_script("--dry-run", "--only", "rms nrom")
    assert ended.returncode == 2
    assert "found 'rms nrom'" in ended.stderr
    for place in (tmp_path, tmp_path / "nowhere" / "found.json"):
        ended = run_script("--dry-run", "--only", "rms norm", "--json", str(place))
        assert ended.returncode == 2
        assert str(place) in ended.stderr
        assert "right" not in ended.stdout


def test_the_script_ends_with_what_it_has(tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    ended = run_script("--dry-run", "--seconds", "0", "--only", "rms norm", "--json", str(kept))
    assert ended.returncode == 3
    assert "out of time, not run: rms norm" in ended.stdout
    assert json.loads(kept.read_text())["not_run"] == ["rms norm", "rms norm with residual"]


def test_a_case_that_does_not_end_is_ended() -> None:
    code = "import sys, time, gpu_check; gpu_check.end_after(0.0); time.sleep(60)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert ended.returncode == 3
    assert "did not end" in ended.stdout


def test_what_is_missing_is_named() -> None:
    code = (
        "import sys, importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'pydantic' else found(name, *rest)\n"
        "import gpu_check; gpu_check.options_of(['--list'])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "found no pydantic" in ended.stderr


def test_cases_are_made_without_packaging() -> None:
    """Which `gpu_check.py` does not say it needs, and a borrowed machine may lack."""
    code = (
        "import sys; sys.modules['packaging'] = None\n"
        "import gpu_check; from gpu_cases import catalogue; print(len(catalogue.all_makers()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == len(MAKERS)
