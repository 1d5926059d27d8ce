"""Rates of this CPU on demand: units, evidence, and the bound of a plan that follows them."""

from __future__ import annotations

import pytest

from hal.device import Confidence
from hal.host import LocalHost
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal.roofline import step_bound_us
from hal_backends.cpu import measurement
from hal_backends.cpu.plugin import hal_describe_device, hal_detect_devices


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(measurement, "_SIZE", 128)
    monkeypatch.setattr(measurement, "_REPEATS", 2)


@pytest.mark.usefixtures("small")
def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    host = LocalHost()
    (detected,) = hal_detect_devices(host)
    device = hal_describe_device(device=detected, host=host)
    measured = measurement.measure_device(device)
    assert measured.memory_bandwidth is not None
    assert 1e6 < measured.memory_bandwidth < 1e13
    assert {"float32", "int8"} <= measured.peak_flops.keys()
    for name in ("memory_bandwidth", *(f"peak_flops.{dtype}" for dtype in measured.peak_flops)):
        assert measured.evidence[name].confidence is Confidence.MEASURED
    # With a clock of our own: a quarter of a second each.
    monkeypatch.setattr(measurement, "_best_seconds", lambda work: work() is None or 0.25)
    timed = measurement.measure_device(device)
    assert timed.memory_bandwidth == (8 << 20) / 0.25
    assert set(timed.peak_flops.values()) == {2 * 128**3 / 0.25}
    request = GemmRequest(n=1024, k=1024, dtype="float32", weight_format=FORMATS["float32"])
    bound_us = step_bound_us([(request, 1)], 1, timed)
    weight_us = 4 * 1024**2 / timed.memory_bandwidth * 1e6
    assert bound_us == pytest.approx(max(weight_us, 2 * 1024**2 / 128**3 / 8 * 1e6), rel=0.02)
