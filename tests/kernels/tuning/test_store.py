"""Kept configurations: which one a launch takes, and that the result stays what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hal.device import DeviceSpec
from hal.errors import SettingsError
from hal_kernels.attention.triton import bind as bind_attention
from hal_kernels.attention.triton_kernels import _attention_decode_kernel
from hal_kernels.gemm.triton import bind
from hal_kernels.gemm.triton_kernels import _gemm_fp8_block_kernel, _gemm_kernel
from hal_kernels.gemm.weight_only_kernels import _gemm_weight_only_kernel
from hal_kernels.grouped_gemm.triton import bind as bind_grouped
from hal_kernels.grouped_gemm.triton_kernels import (
    _grouped_gemm_kernel,
    _grouped_gemm_mxfp4_kernel,
)
from hal_kernels.tuning.configuration_files import ConfigurationFile, ShapeEntry, Trial
from hal_kernels.tuning.session import TuningTask
from hal_kernels.tuning.store import (
    code_hash,
    configuration_path,
    forced_configuration,
    save_configurations,
    triton_version,
    user_store,
)

Tasks = Callable[..., TuningTask]


def keep(task: TuningTask, configuration: dict[str, int], **changes: Any) -> Path:
    """A complete entry of one trial for the task's class."""
    trial = Trial(configuration=configuration, tier="native", us=5.0, registers=40)
    fields: dict[str, Any] = {
        "shape": str(task.shape), "basis": "measured", "code": code_hash(task.tunable.kernel),
        "triton": triton_version(), "made": "2026-01-01", "is_complete": True, "trials": [trial],
    } | changes  # fmt: skip
    document = ConfigurationFile(
        device=task.key,
        arch=task.target.arch,
        kernel=task.tunable.kernel,
        entries=[ShapeEntry(**fields)],
    )
    path = configuration_path(user_store(), task.key, task.tunable.kernel)
    save_configurations(path, document)
    return path


class Launches:
    """Notes with which constants a kernel is launched; it runs as ever."""

    def __init__(self, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[dict[str, Any]] = []
        run = type(kernel).run

        def noting(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is kernel:
                self.seen.append(kwargs)
            return run(this, *args, **kwargs)

        monkeypatch.setattr(type(kernel), "run", noting)


@pytest.mark.parametrize(
    ("kernel", "function", "change"),
    [
        ("gemm.dense", _gemm_kernel, {"BLOCK_N": 32, "SPLIT_K": 2}),
        ("gemm.fp8_block", _gemm_fp8_block_kernel, {"BLOCK_N": 32, "num_warps": 8}),
        ("gemm.fp8_weight_only", _gemm_weight_only_kernel, {"BLOCK_N": 32, "num_warps": 2}),
    ],
)
def test_a_launch_takes_the_configuration_of_its_class_and_no_other(
    kernel: str, function: Any, change: dict[str, int], task: Tasks, device: DeviceSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one = task(kernel)
    kept = one.configurations[0] | change
    call = one.tunable.call(one.shape, "cpu")
    before = bind(call.request, device, **call.static)(*call.args)
    keep(one, kept)
    launches = Launches(function, monkeypatch)
    product = bind(call.request, device, **call.static)
    after = product(*call.args)
    (seen,) = launches.seen
    assert {name: seen[name] for name in change} == change
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)
    # 40 rows are of another class, and another width is of another site.
    product(call.args[0].repeat(3, 1)[:40])
    default = one.tunable.default(one.target, dataclasses.replace(one.shape, rows=64))
    assert launches.seen[-1]["BLOCK_M"] == default.configuration["BLOCK_M"]
    wider = task(kernel, "n=128,k=128,rows=4")
    other = wider.tunable.call(wider.shape, "cpu")
    bind(other.request, device, **other.static)(*other.args)
    assert launches.seen[-1]["BLOCK_N"] == one.configurations[0]["BLOCK_N"]


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        ("grouped_gemm.dense", _grouped_gemm_kernel),
        ("grouped_gemm.mxfp4", _grouped_gemm_mxfp4_kernel),
    ],
)
def test_products_per_expert_take_the_configuration_of_the_rows_of_an_expert(
    kernel: str, function: Any, task: Tasks, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = task(kernel, "experts=2,k=64,n=64,rows=4")
    call = one.tunable.call(one.shape, "cpu")
    before = bind_grouped(call.request, device, **call.static)(*call.args)
    keep(one, one.configurations[0] | {"BLOCK_N": 16, "num_warps": 2})
    launches = Launches(function, monkeypatch)
    after = bind_grouped(call.request, device, **call.static)(*call.args)
    (seen,) = launches.seen
    assert (seen["BLOCK_N"], seen["num_warps"]) == (16, 2)
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


def test_a_decode_takes_the_configuration_of_its_number_of_sequences(
    task: Tasks, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hal_kernels.attention.triton_tuning.KEYS", 48)
    one = task("attention.decode", "group=2,head_dim=16,kv_heads=1,rows=1")
    call = one.tunable.call(one.shape, "cpu")
    q, *caches, meta = call.args
    few = (q[:2], *caches, dataclasses.replace(
        meta, query_start_loc=meta.query_start_loc[:3], seq_lens=meta.seq_lens[:2],
        block_table=meta.block_table[:2],
    ))  # fmt: skip
    before = bind_attention(call.request, device, **call.static)(*few)
    keep(one, one.configurations[0] | {"BLOCK_N": 16})
    launches = Launches(_attention_decode_kernel, monkeypatch)
    after = bind_attention(call.request, device, **call.static)(*few)
    assert [seen["BLOCK_N"] for seen in launches.seen] == [16]
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_complete": False},
        {"code": "0" * 16},
        {"triton": "1.0"},
        {"trials": []},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_does_not_hold_is_not_launched(
    changes: dict[str, Any], task: Tasks, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = task()
    keep(one, one.configurations[0] | {"BLOCK_N": 32}, **changes)
    call = one.tunable.call(one.shape, "cpu")
    launches = Launches(_gemm_fp8_block_kernel, monkeypatch)
    bind(call.request, device, **call.static)(*call.args)
    assert launches.seen[0]["BLOCK_N"] == one.configurations[0]["BLOCK_N"]


def test_constants_that_the_kernel_does_not_take_are_an_error(
    task: Tasks, device: DeviceSpec
) -> None:
    one = task()
    keep(one, one.configurations[0] | {"BLOCK_Z": 32})
    call = one.tunable.call(one.shape, "cpu")
    with pytest.raises(SettingsError, match="BLOCK_Z"):
        bind(call.request, device, **call.static)(*call.args)


def test_what_is_forced_wins_and_ends_with_its_block(
    task: Tasks, device: DeviceSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = task()
    keep(one, one.configurations[0] | {"BLOCK_N": 32})
    call = one.tunable.call(one.shape, "cpu")
    launches = Launches(_gemm_fp8_block_kernel, monkeypatch)
    with forced_configuration(one.tunable.kernel, one.configurations[0]) as forced:
        bind(call.request, device, **call.static)(*call.args)
    assert forced.is_launched
    with forced_configuration("gemm.dense", {}) as other:
        bind(call.request, device, **call.static)(*call.args)
    assert not other.is_launched
    default = one.configurations[0]["BLOCK_N"]
    assert [seen["BLOCK_N"] for seen in launches.seen] == [default, 32]
