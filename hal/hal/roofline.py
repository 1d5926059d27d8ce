"""Roofline bounds: the least time that an op can take on a device whose rates were measured.

max(bytes / bandwidth, operations / rate), after https://doi.org/10.1145/1498765.1498785. Only rates
that somebody measured count: without them there is no bound, never a guessed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hal.device import DeviceSpec
from hal.ops import CATALOGUE
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import OpRequest


@dataclass(frozen=True, slots=True)
class Bound:
    """Least time of one call in µs, and what sets it."""

    us: float
    by: Literal["memory", "compute"]


def bound_of(request: OpRequest, tokens: int, device: DeviceSpec) -> Bound | None:
    """The bound of one call with that many tokens; None where a rate it needs is not known.

    Collectives have none: what links the ranks is not the device's memory.
    """
    if not device.memory_bandwidth or request.op == "collective":
        return None
    family = CATALOGUE[request.op]
    memory_us = family.bytes_moved(request, tokens) / device.memory_bandwidth * 1e6
    operations = family.flops(request, tokens)
    if not operations:
        return Bound(memory_us, "memory")
    rate = device.peak_flops.get(_unit(request))
    if not rate:
        return None
    compute_us = operations / rate * 1e6
    return Bound(memory_us, "memory") if memory_us >= compute_us else Bound(compute_us, "compute")


def _unit(request: OpRequest) -> str:
    """The dtype whose rate bounds the arithmetic."""
    if isinstance(request, GemmRequest | GroupedGemmRequest):
        if request.weight_format.activation == "int8_per_token":
            return "int8"
        return request.dtype
    # Everything else accumulates in float32, or in its own dtype at the same rate or better.
    return str(getattr(request, "dtype", "float32"))


def step_bound_us(
    sites: Iterable[tuple[OpRequest, int]], tokens: int, device: DeviceSpec
) -> float | None:
    """Sum of the bounds of a step's (request, number of calls); None if one has no bound."""
    total = 0.0
    for request, calls in sites:
        bound = bound_of(request, tokens, device)
        if bound is None:
            return None
        total += bound.us * calls
    return total
