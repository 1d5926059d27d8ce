"""The launch of compiled workers on torch's OpenMP threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hal_kernels.cpu_intrinsics import pointer_int64
from hal_kernels.cpu_jit import compile_worker
from hal_kernels.cpu_launch import Launch, bind_stages, bind_worker
from hal_kernels.cpu_launch_memory import Stage
from hal_kernels.cpu_simd import FP32, LANES, vector_exp, vector_load, vector_store
from hal_kernels.openmp_runtime import parallel_runtime


def make_counter(step: int) -> Callable[[int, int, int, int], None]:
    def count(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        visits, threads = pointer_int64(args[0]), pointer_int64(args[1])
        for item in range(begin, end):
            visits[item] += step
            threads[item] = thread
            for _ in range(2000):  # long enough for the second thread to take part
                visits[item] += args[2]
                visits[item] -= args[2]

    return count


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("num_items", "grain"), [(0, 4), (1, 1), (3, 4), (1000, 7), (4096, 1)])
def test_every_item_runs_once(num_items: int, grain: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    launch = bind_worker(compile_worker(make_counter(3), cache=False), 2, (11,))
    visits = torch.zeros(num_items + 1, dtype=torch.int64)
    threads = torch.full((num_items + 1,), -1, dtype=torch.int64)
    try:
        torch.set_num_threads(num_threads)
        launch(num_items, grain, visits.data_ptr(), threads.data_ptr())
    finally:
        torch.set_num_threads(before)
    assert (visits[:num_items] == 3).all()
    assert visits[num_items] == 0
    assert set(threads[:num_items].tolist()) <= set(range(num_threads))


def make_sums() -> tuple[
    Callable[[int, int, int, int], None], Callable[[int, int, int, int], None]
]:
    def double(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        for item in range(begin, end):
            pointer_int64(args[1])[item] = pointer_int64(args[0])[item] * args[2]

    def total(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        for item in range(begin, end):
            result = 0
            for other in range(args[2]):
                result += pointer_int64(args[0])[other] * (item + args[3])
            pointer_int64(args[1])[item] = result

    return double, total


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("grains", [(5000, 5000), (7, 5000), (5000, 3), (7, 3)])
def test_second_stage_sees_all_of_the_first(grains: tuple[int, int], num_threads: int) -> None:
    before = torch.get_num_threads()
    double, total = (compile_worker(worker, cache=False) for worker in make_sums())
    launch = bind_stages(Stage(double, 2, (2,)), Stage(total, 3, (10,)))
    try:
        torch.set_num_threads(num_threads)
        for size in (1, 900, 2000):
            x = torch.randint(-1000, 1000, (size,))
            doubled, sums = torch.zeros(size, dtype=torch.int64), torch.zeros(50, dtype=torch.int64)
            launch(
                (size, grains[0], x.data_ptr(), doubled.data_ptr()),
                (50, grains[1], doubled.data_ptr(), sums.data_ptr(), size),
            )
            assert torch.equal(doubled, 2 * x)
            assert torch.equal(sums, 2 * x.sum() * (torch.arange(50) + 10))
    finally:
        torch.set_num_threads(before)


def test_constants_hold_their_tensors() -> None:
    def read(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        pointer_int64(args[0])[0] = pointer_int64(args[1])[5]

    def bind() -> Launch:
        return bind_worker(compile_worker(read, cache=False), 1, (torch.arange(70, 1070),))

    launch, out = bind(), torch.zeros(1, dtype=torch.int64)
    noise = [torch.full((1000,), -1) for _ in range(50)]
    launch(1, 1, out.data_ptr())
    assert out.item() == 75
    assert len(noise) == 50


def test_runtime_is_torchs_openmp_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, reason = parallel_runtime()
    assert reason
    if "ATen parallel backend: OpenMP" in torch.__config__.parallel_info():
        assert runtime is not None
    monkeypatch.setattr(
        torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool\n"
    )
    parallel_runtime.cache_clear()
    try:
        runtime, reason = parallel_runtime()
        assert runtime is None
        assert "native thread pool" in reason
        launch = bind_worker(compile_worker(make_counter(1), cache=False), 2, (1,))
        visits, threads = torch.zeros(2, 50, dtype=torch.int64)
        launch(50, 1, visits.data_ptr(), threads.data_ptr())
        assert (visits == 1).all()
        assert (threads == 0).all()
    finally:
        parallel_runtime.cache_clear()


def test_compiled_code_is_cached_in_the_given_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compile_worker(make_counter(17))
    assert list(tmp_path.rglob("*.nbc"))
    compile_worker(make_counter(18))
    assert len(list(tmp_path.rglob("*.nbc"))) == 2  # the constant is part of the key


def test_exp_is_within_its_stated_bound() -> None:
    def exp(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        for item in range(begin, end):
            vector_store(
                args[1], item * LANES, vector_exp(vector_load(args[0], item * LANES, FP32)), FP32
            )

    worker = compile_worker(exp, cache=False)
    assert "vfmadd" in worker.assembly()
    special = torch.tensor([math.nan, math.inf, -math.inf, -200.0, 200.0, 0.0, -0.0, 88.7])
    x = torch.cat((torch.rand(99992) * 175 - 86.5, special))
    y = torch.empty_like(x)
    bind_worker(worker, 2)(x.numel() // LANES, 1000, x.data_ptr(), y.data_ptr())
    exact = x.double().exp()
    ulp = torch.from_numpy(np.spacing(exact[:-8].float().numpy())).double()
    assert ((y[:-8].double() - exact[:-8]).abs() <= 1.01 * ulp).all()
    assert y[-8].isnan()
    assert y[-7:-1].tolist() == [math.inf, 0.0, 0.0, math.inf, 1.0, 1.0]
