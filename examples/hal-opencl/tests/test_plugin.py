"""The hooks themselves: what a runtime is, golden values, measured rates."""

from __future__ import annotations

import pytest

from hal.device import Confidence, DeviceSpec
from hal_opencl import measurement, plugin


def test_runtime_and_self_test(any_memory: DeviceSpec) -> None:
    runtime = plugin.hal_create_runtime(device=any_memory)
    assert runtime.torch_device.type == "cpu"
    assert runtime.num_threads == any_memory.num_cores
    assert 0 < runtime.free_memory_bytes() <= any_memory.memory_bytes
    runtime.synchronize()
    results = plugin.hal_self_test(runtime=runtime)
    assert len(results) >= 5
    assert all(result.passed for result in results), results
    with pytest.raises(RuntimeError, match="drop --tp"):
        runtime.create_group(0, 2, "/nowhere")


def test_self_test_is_for_its_own_runtime() -> None:
    with pytest.raises(TypeError, match="OpenClRuntime"):
        plugin.hal_self_test(runtime=object())


def test_measurement(device: DeviceSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates with their evidence; a small block is enough to see that."""
    monkeypatch.setattr(measurement, "_READ_SHAPE", (512, 256))
    measured = plugin.hal_measure_device(device=device)
    assert measured.memory_bandwidth is not None
    assert measured.memory_bandwidth > 1e6
    assert measured.peak_flops["float32"] > 1e6
    for field in ("memory_bandwidth", "peak_flops.float32"):
        assert measured.evidence[field].confidence is Confidence.MEASURED
