"""A store of configurations in a folder of the test, and a small class to tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from faithful_interpreter import install
from gpu_devices import gpu
from hal.device import DeviceSpec
from hal_kernels.aot.targets import Target, find_target
from hal_kernels.tuning.configuration_files import Basis, Trial
from hal_kernels.tuning.session import TuningTask, make_task
from hal_kernels.tuning.shapes import ShapeClass, parse_shape
from hal_kernels.tuning.tunable_kernels import find_tunable

install()

KERNEL, SHAPE = "gemm.fp8_block", "n=64,k=128,rows=4"


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user's configurations are in the test: nobody's own are read or written."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def device() -> DeviceSpec:
    """An accelerator whose kernels run in the interpreter, with rates."""
    spec = gpu("sm_89")
    return replace(
        spec,
        attributes={**spec.attributes, "compute_units": 128, "profile": "test-card"},
        memory_bandwidth=1e12,
        peak_flops={"bfloat16": 1.6e14, "float16": 1.6e14, "fp8": 3.3e14},
    )


@pytest.fixture
def task(device: DeviceSpec) -> Callable[..., TuningTask]:
    """task(kernel, shape, basis=...) of the device."""

    def make(kernel: str = KERNEL, shape: str = SHAPE, basis: Basis = "modelled") -> TuningTask:
        tunable, target = find_tunable(kernel), find_target(device.arch)
        dtypes: Sequence[str] = tunable.dtypes(target)
        found = parse_shape(
            shape, size_names=tunable.size_names, forms=tunable.forms, dtypes=dtypes
        )
        return make_task(tunable, found, target, device, basis=basis)

    return make


class Compiler:
    """In place of a compiler: a machine code for each configuration, and what it was asked."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.asked: list[dict[str, int]] = []
        self.interrupted_at = interrupted_at

    def __call__(
        self, kernel: str, target: Target, shape: ShapeClass, configuration: Mapping[str, int]
    ) -> Trial:
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(dict(configuration))
        wide = configuration.get("BLOCK_N", 64)
        return Trial(
            configuration=dict(configuration), tier="native", registers=32 + wide // 2,
            shared_bytes=wide * 256, instruction="mma.sync", instruction_count=4,
        )  # fmt: skip


@pytest.fixture
def compiler() -> type[Compiler]:
    return Compiler


class Spilling(Compiler):
    """Of whose code none is native, so that every configuration has to be looked at."""

    def __call__(
        self, kernel: str, target: Target, shape: ShapeClass, configuration: Mapping[str, int]
    ) -> Trial:
        trial = super().__call__(kernel, target, shape, configuration)
        return trial.model_copy(update={"tier": "spilled"})


@pytest.fixture
def spilling() -> type[Spilling]:
    return Spilling
