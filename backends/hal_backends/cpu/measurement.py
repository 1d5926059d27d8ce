"""Measures this CPU: read bandwidth of memory and rates of matrix products, with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hal.device import Confidence, DeviceSpec, Evidence

# Well beyond any last-level cache share of a few cores, and quick to read.
_BUFFER_BYTES = 512 << 20
_REPEATS = 7
_SIZE = 1024  # of the square product


def measure_device(device: DeviceSpec) -> DeviceSpec:
    """The device with memory_bandwidth (bytes/s) and peak_flops by dtype, each the best of a few.

    The best, not the median: other load can only make a measurement slower than the machine is.
    """
    threads = max(1, device.num_cores)
    torch.set_num_threads(threads)
    evidence = dict(device.evidence)
    bandwidth = _read_bandwidth()
    evidence["memory_bandwidth"] = Evidence(
        source=f"reads of {_BUFFER_BYTES >> 20} MiB, {threads} threads, best of {_REPEATS}",
        found=f"{bandwidth / 1e9:.1f} GB/s",
        confidence=Confidence.MEASURED,
    )
    rates = {"float32": _float_rate(torch.float32)}
    if device.features & {"amx_bf16", "avx512_bf16", "bf16"}:
        rates["bfloat16"] = _float_rate(torch.bfloat16)
    rates["int8"] = _int8_rate()
    for name, rate in rates.items():
        evidence[f"peak_flops.{name}"] = Evidence(
            source=f"{_SIZE}x{_SIZE}x{_SIZE} product, {threads} threads, best of {_REPEATS}",
            found=f"{rate / 1e9:.0f} G/s",
            confidence=Confidence.MEASURED,
        )
    return replace(device, memory_bandwidth=bandwidth, peak_flops=rates, evidence=evidence)


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _read_bandwidth() -> float:
    """The better of two ways to read a buffer once: a sum of int64, a matrix times a vector."""
    buffer = torch.ones(_BUFFER_BYTES // 8, dtype=torch.int64)
    by_sum = _best_seconds(buffer.sum)
    matrix = buffer.view(torch.float32).view(-1, _SIZE)
    vector = torch.randn(_SIZE)
    by_product = _best_seconds(lambda: torch.mv(matrix, vector))
    return _BUFFER_BYTES / min(by_sum, by_product)


def _float_rate(dtype: torch.dtype) -> float:
    a, b = torch.randn(_SIZE, _SIZE).to(dtype), torch.randn(_SIZE, _SIZE).to(dtype)
    return 2.0 * _SIZE**3 / _best_seconds(lambda: torch.mm(a, b))


def _int8_rate() -> float:
    """The better of torch's two int8 products (which one is faster differs by CPU)."""
    a = torch.randint(-127, 128, (_SIZE, _SIZE), dtype=torch.int8)
    b = torch.randint(-127, 128, (_SIZE, _SIZE), dtype=torch.int8)
    seconds = _best_seconds(lambda: torch._int_mm(a, b))
    packed = torch.ops.onednn.qlinear_prepack(b, None)
    scales, zero_points = torch.ones(_SIZE), torch.zeros(_SIZE, dtype=torch.int32)
    rows = (a.int() + 128).to(torch.uint8)

    def product() -> torch.Tensor:
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows, 1.0, 128, packed, scales, zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return y

    return 2.0 * _SIZE**3 / min(seconds, _best_seconds(product))
