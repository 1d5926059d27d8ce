"""Roofline bounds: the least time that an op can take on a device whose rates are known.

max(bytes / bandwidth, operations / rate), after https://doi.org/10.1145/1498765.1498785. The rates
are the device's own, each with its evidence: measured ones, or a database's for a device that is
not here. Where one of the two rates is not known the other one alone is still a lower limit, and
the bound says so; a rate is never guessed.
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

# An attribute of a device: keys of its evidence, divided by spaces, whose rates are no peaks.
MEASURED_ELSEWHERE = "rates_measured_elsewhere"
BoundBy = Literal["memory", "compute", "link", "memory only", "compute only"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Least time of one call in µs, and what sets it.

    "memory only", "compute only": the rate of the other is not known, so the bound is of one half
    of the work; it is still a lower limit."""

    us: float
    by: BoundBy

    @property
    def is_partial(self) -> bool:
        """Whether it is of one half of the work only."""
        return self.by.endswith("only")


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
    """The bound of one call with that many tokens; None where no rate of it is known.

    candidate: bound of what this implementation does, which may be more than the op needs.
    link: of the group, for collectives: without it they have no bound, since what links the ranks
    is not the device's memory.
    """
    own = None if candidate is None else work_of(candidate, request, tokens)
    work = own or needed_work(request, tokens)
    return bound_of_work(request, work, device, link)


def bound_of_work(
    request: OpRequest, work: Work, device: DeviceSpec, link: GroupLink | None = None
) -> Bound | None:
    """The bound of so much work of an op, see `bound_of`."""
    if isinstance(request, CollectiveRequest):
        return _link_bound(work, link)
    rate = device.peak_flops.get(work.unit)
    memory_us = work.bytes / device.memory_bandwidth * 1e6 if device.memory_bandwidth else None
    compute_us = work.flops / rate * 1e6 if rate and work.flops else None
    if memory_us is None:
        return None if compute_us is None else Bound(compute_us, "compute only")
    if compute_us is None:
        return Bound(memory_us, "memory only" if work.flops else "memory")
    return Bound(memory_us, "memory") if memory_us >= compute_us else Bound(compute_us, "compute")


def _link_bound(work: Work, link: GroupLink | None) -> Bound | None:
    if link is None or not link.bandwidth_bytes_per_s:
        return None
    return Bound((link.latency_us or 0.0) + work.bytes / link.bandwidth_bytes_per_s * 1e6, "link")


def unverified_rates(
    requests: Iterable[OpRequest], device: DeviceSpec, link: GroupLink | None = None
) -> list[str]:
    """The rates that bounds of these requests rest on and that only an unverified source states.
    A rate that nobody states bounds nothing."""
    keys = rate_keys(requests, device)
    found = [
        f"{name} ({device.evidence[key].source})"
        for key, name in keys.items()
        if key in device.evidence and device.evidence[key].confidence is Confidence.UNVERIFIED
    ]
    has_rate = link is not None and link.bandwidth_bytes_per_s
    if link and has_rate and link.evidence.confidence is Confidence.UNVERIFIED:
        found.append(f"bandwidth of the link ({link.evidence.source})")
    return found


def measured_elsewhere(requests: Iterable[OpRequest], device: DeviceSpec) -> list[str]:
    """The rates that bounds of these requests rest on and that somebody measured on another card of
    the product, where its maker states none: the product may be faster."""
    measured = str(device.attributes.get(MEASURED_ELSEWHERE, "")).split()
    return [
        f"{name} ({device.evidence[key].source})" if key in device.evidence else name
        for key, name in rate_keys(requests, device).items()
        if key in measured
    ]


def rate_keys(requests: Iterable[OpRequest], device: DeviceSpec) -> dict[str, str]:
    """Key of `DeviceSpec.evidence` -> name, of the known rates that bound these requests."""
    keys = {"memory_bandwidth": "memory bandwidth"} if device.memory_bandwidth else {}
    for request in requests:
        if not isinstance(request, CollectiveRequest):
            unit = needed_work(request, request.tokens.high).unit
            if device.peak_flops.get(unit):
                keys[f"peak_flops.{unit}"] = f"peak rate of {unit}"
    return keys


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
