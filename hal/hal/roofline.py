"""Roofline bounds: the least time that an op can take on a device whose rates are known.

max(bytes / bandwidth, operations / rate), after https://doi.org/10.1145/1498765.1498785. The rates
are the device's own, each with its evidence: measured ones, or a database's for a device that is
not here. Without a rate there is no bound, never a guessed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hal.answers import work_of
from hal.candidates import KernelCandidate, Work
from hal.device import Confidence, DeviceSpec
from hal.device_group import GroupLink
from hal.ops import CATALOGUE
from hal.ops.collective import CollectiveRequest
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.request import OpRequest


@dataclass(frozen=True, slots=True)
class Bound:
    """Least time of one call in µs, and what sets it."""

    us: float
    by: Literal["memory", "compute", "link"]


def needed_work(request: OpRequest, tokens: int) -> Work:
    """What the op needs at least, on the unit of the request's dtype."""
    family = CATALOGUE[request.op]
    return Work(
        flops=family.flops(request, tokens),
        bytes=family.bytes_moved(request, tokens),
        unit=_unit(request),
    )


def bound_of(
    request: OpRequest,
    tokens: int,
    device: DeviceSpec,
    *,
    candidate: KernelCandidate | None = None,
    link: GroupLink | None = None,
) -> Bound | None:
    """The bound of one call with that many tokens; None where a rate it needs is not known.

    candidate: bound of what this implementation does, which may be more than the op needs.
    link: of the group, for collectives: without it they have no bound, since what links the ranks
    is not the device's memory.
    """
    own = None if candidate is None else work_of(candidate, request, tokens)
    work = own or needed_work(request, tokens)
    if isinstance(request, CollectiveRequest):
        return _link_bound(work, link)
    if not device.memory_bandwidth:
        return None
    memory_us = work.bytes / device.memory_bandwidth * 1e6
    if not work.flops:
        return Bound(memory_us, "memory")
    rate = device.peak_flops.get(work.unit)
    if not rate:
        return None
    compute_us = work.flops / rate * 1e6
    return Bound(memory_us, "memory") if memory_us >= compute_us else Bound(compute_us, "compute")


def _link_bound(work: Work, link: GroupLink | None) -> Bound | None:
    if link is None or not link.bandwidth_bytes_per_s:
        return None
    return Bound((link.latency_us or 0.0) + work.bytes / link.bandwidth_bytes_per_s * 1e6, "link")


def unverified_rates(
    requests: Iterable[OpRequest], device: DeviceSpec, link: GroupLink | None = None
) -> list[str]:
    """The rates that bounds of these requests rest on and that only an unverified source states.
    A rate that nobody states bounds nothing, and without the bandwidth no other one does."""
    keys = {"memory_bandwidth": "memory bandwidth"} if device.memory_bandwidth else {}
    for request in requests if keys else ():
        if not isinstance(request, CollectiveRequest):
            unit = needed_work(request, request.tokens.high).unit
            if device.peak_flops.get(unit):
                keys[f"peak_flops.{unit}"] = f"peak rate of {unit}"
    found = [
        f"{name} ({device.evidence[key].source})"
        for key, name in keys.items()
        if key in device.evidence and device.evidence[key].confidence is Confidence.UNVERIFIED
    ]
    has_rate = link is not None and link.bandwidth_bytes_per_s
    if link and has_rate and link.evidence.confidence is Confidence.UNVERIFIED:
        found.append(f"bandwidth of the link ({link.evidence.source})")
    return found


def _unit(request: OpRequest) -> str:
    """The dtype whose rate bounds the arithmetic."""
    if isinstance(request, GemmRequest | GroupedGemmRequest):
        rounds = request.weight_format.activation != "float"
        return request.weight_format.compute_dtype if rounds else request.dtype
    # Everything else accumulates in float32, or in its own dtype at the same rate or better.
    dtype = str(getattr(request, "dtype", "float32"))
    return "fp8" if dtype.startswith("float8") else dtype


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
