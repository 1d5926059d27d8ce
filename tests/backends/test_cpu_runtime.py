"""The CPU runtime refuses to run several cores' kernels on one of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hal.device import DeviceSpec
from hal.errors import DetectionError
from hal_backends.cpu import runtime

DEVICE = DeviceSpec(
    device_id="cpu:0",
    vendor="v",
    backend="cpu",
    name="n",
    arch="a",
    torch_device="cpu",
    num_cores=2,
)


def test_kernels_without_threads_are_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(runtime, "parallel_runtime", lambda: (None, "torch uses TBB"))
    with pytest.raises(DetectionError, match="torch uses TBB"):
        runtime.CpuRuntime(DEVICE)
    assert torch.get_num_threads() == threads
    one = runtime.CpuRuntime(dataclasses.replace(DEVICE, num_cores=1))
    assert one.num_threads == 1
    torch.set_num_threads(threads)


def test_this_machine_has_them() -> None:
    threads = torch.get_num_threads()
    assert runtime.CpuRuntime(DEVICE).num_threads == 2
    torch.set_num_threads(threads)
