"""Measures a device with its own matrix product: reads of memory, and the rate in float32."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hal.device import Confidence, DeviceSpec, Evidence
from hal.ops.formats import FORMATS
from hal.ops.gemm import GemmRequest
from hal_opencl.gemm import load_gemm

_REPEATS = 5
# One row through 256 MiB of weights is a read of memory and hardly anything else.
_READ_SHAPE = (16384, 4096)
_RATE_ROWS, _RATE_SIZE = 512, 1024


def measure_device(device: DeviceSpec) -> DeviceSpec:
    """The device with memory_bandwidth (bytes/s) and the rate of float32, each the best of a few:
    other load can only make a measurement slower than the device is."""
    n, k = _READ_SHAPE
    bandwidth = n * k * 4 / _best_seconds(_product(device, 1, n, k))
    rate = 2.0 * _RATE_ROWS * _RATE_SIZE**2
    rate /= _best_seconds(_product(device, _RATE_ROWS, _RATE_SIZE, _RATE_SIZE))
    seen = {
        "memory_bandwidth": (f"gemm of 1 row, {n}x{k}", f"{bandwidth / 1e9:.1f} GB/s"),
        "peak_flops.float32": (
            f"gemm of {_RATE_ROWS} rows, {_RATE_SIZE}x{_RATE_SIZE}",
            f"{rate / 1e9:.0f} GFLOP/s",
        ),
    }
    evidence = {
        field: Evidence(
            source=f"{source}, best of {_REPEATS}", found=found, confidence=Confidence.MEASURED
        )
        for field, (source, found) in seen.items()
    }
    return replace(
        device,
        memory_bandwidth=bandwidth,
        peak_flops={**device.peak_flops, "float32": rate},
        evidence={**device.evidence, **evidence},
    )


def _product(device: DeviceSpec, rows: int, n: int, k: int) -> Callable[[], object]:
    request = GemmRequest(n=n, k=k, dtype="float32", weight_format=FORMATS["float32"])
    kernel = load_gemm(device)(request, weight=torch.ones(n, k))
    x = torch.ones(rows, k)
    return lambda: kernel(x)


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
