"""Times one configuration on a live device, through the very launcher that serves.

A timer is injected: the device's own, or one of a test.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from hal.device import DeviceSpec
from hal.errors import KernelTuningError
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.shapes import ShapeClass
from hal_kernels.tuning.store import forced_configuration
from hal_kernels.tuning.tunable import TunableKernel

Timer = Callable[[Callable[[], Any]], float]
"""Microseconds of one call."""

_WARM_CALLS, _LEAST_CALLS, _MOST_CALLS = 3, 10, 200
_SECONDS = 0.2
_FLUSH_BYTES = 256 << 20  # more than a second-level cache has
_MAX_ERROR = 300


class Measuring:
    """Measures configurations of one class with the same operands."""

    def __init__(
        self, tunable: TunableKernel, shape: ShapeClass, device: DeviceSpec, timer: Timer
    ) -> None:
        self._tunable, self._device, self._timer = tunable, device, timer
        self._form = shape.form
        self._call = tunable.call(shape, device.torch_device)

    def measure(self, trial: Trial) -> Trial:
        """The trial with its time, or with why it has none.

        Raises KernelTuningError if the launch ended in another kernel, or if the device answers no
        more: then nothing that follows would be a measurement.
        """
        try:
            us = self._time(trial.configuration)
        except KernelTuningError:
            raise
        except Exception as error:  # noqa: BLE001 - a launch that is refused, in whatever way, is the result
            self._check_device(error)
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return trial.model_copy(update={"error": text[:_MAX_ERROR]})
        return trial.model_copy(update={"us": us})

    def _time(self, configuration: Mapping[str, int]) -> float:
        call, module = self._call, importlib.import_module(self._tunable.module)
        with forced_configuration(self._tunable.kernel, configuration, self._form) as forced:
            kernel = module.bind(call.request, self._device, **call.static)
            us = self._timer(lambda: kernel(*call.args))
        if not forced.is_launched:
            raise KernelTuningError(
                f"measurement of {self._tunable.kernel}",
                f"a call that it serves on {self._device.name}",
                "the call ended in another kernel",
                "tune that one: `hal plan --json` names the kernel of each call",
            )
        return us

    def _check_device(self, error: Exception) -> None:
        if self._device.torch_device == "cpu":
            return
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError as after:
            raise KernelTuningError(
                f"measurement of {self._tunable.kernel}",
                "a device that still answers",
                f"{type(error).__name__}: {error}; then {after}",
                "run the command again: it goes on with the next configuration",
            ) from error


def device_timer(torch_device: str) -> Timer:
    """The median over repeated calls by the device's own clock, its cache emptied before each; of
    the CPU, where the interpreter runs, one call by the wall clock."""
    if torch_device == "cpu":
        return _wall_clock
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=torch_device)

    def once(call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def timer(call: Callable[[], Any]) -> float:
        for _ in range(_WARM_CALLS):
            call()
        first = once(call)
        count = int(_SECONDS * 1e6 / max(first, 1.0))
        calls = min(_MOST_CALLS, max(_LEAST_CALLS, count))
        return statistics.median(once(call) for _ in range(calls))

    return timer


def _wall_clock(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
