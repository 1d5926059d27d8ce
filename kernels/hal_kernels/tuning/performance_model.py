"""An analytic model of a kernel's time, from its grid and what its machine code takes.

It ranks configurations where there is no device, and says what one may lose: it is a model and no
measurement. The busiest multiprocessor decides. It executes its share of the grid; its arithmetic
goes at its share of the peak rate, less where too few warps are resident to fill the schedulers;
its loads go at most at a few times its share of the memory's bandwidth (what repeats comes from the
cache), and by Little's law at most at the bytes in flight over the latency. What has to come from
memory takes its bytes over the bandwidth. The slowest of the three is the time. The assumed
figures below are round and the same for all devices: they serve ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hal.device import DeviceSpec
from hal_kernels.aot.occupancy import Occupancy, occupancy_limits, occupancy_of

LATENCY_US = 0.6
"""Assumed from a load to its value."""
CACHE_FACTOR = 3.0
"""Assumed rate of loads that hit the cache, over that of the memory."""
WARPS_TO_FILL = 2
"""Assumed resident warps of a scheduler that keep its matrix unit busy."""

By = Literal["memory", "loads", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a launch does, its padding included.

    programs: of the grid. flops: of all of them. step_bytes: that one program loads in one step of
    its loop; steps: of one program. memory_bytes: what the memory must deliver and take at least.
    needed_flops: without padding.
    """

    programs: int
    steps: int
    step_bytes: int
    flops: float
    needed_flops: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of the machine code. stages: of the loop's pipeline. unit: whose peak rate its arithmetic
    has, a key of `DeviceSpec.peak_flops`."""

    registers: int
    shared_bytes: int
    num_warps: int
    stages: int
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Of one device. units: multiprocessors."""

    arch: str
    units: int
    bandwidth: float
    peak_flops: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """us: of one launch, without what launching takes. bound_us: by the rates alone. waves: rounds
    in which the grid is executed. loss: the share of `us` that no configuration need lose."""

    us: float
    by: By
    bound_us: float
    waves: float
    occupancy: Occupancy

    @property
    def loss(self) -> float:
        return max(0.0, 1.0 - self.bound_us / self.us)


def device_rates(device: DeviceSpec) -> DeviceRates | str:
    """The rates that the model needs, or which of them is not known of the device."""
    units = int(device.attributes.get("compute_units") or device.num_cores)
    if device.arch not in occupancy_limits():
        return f"occupancy limits of {device.arch or 'an unknown architecture'}"
    if not units:
        return "the number of its multiprocessors"
    if not device.memory_bandwidth:
        return "its memory bandwidth"
    return DeviceRates(
        arch=device.arch,
        units=units,
        bandwidth=device.memory_bandwidth,
        peak_flops=dict(device.peak_flops),
    )


def predict(footprint: Footprint, used: Resources, device: DeviceRates) -> Prediction | str:
    """The time of a launch; why there is none where a block does not fit or a rate is missing."""
    limits = occupancy_limits()[device.arch]
    held = occupancy_of(
        limits,
        registers=used.registers,
        shared_bytes=used.shared_bytes,
        num_warps=used.num_warps,
    )
    if not held.blocks:
        return f"no block fits on a multiprocessor: {held.limited_by}"
    rate = device.peak_flops.get(used.unit)
    if footprint.flops and not rate:
        return f"the peak rate of {used.unit} is not known"
    busiest = -(-footprint.programs // device.units)
    resident = min(held.blocks, busiest)
    warps = resident * used.num_warps
    filled = min(1.0, warps / (WARPS_TO_FILL * limits.schedulers))
    share = footprint.flops / footprint.programs
    compute_us = busiest * share / (rate / device.units * filled) * 1e6 if rate else 0.0
    in_flight = resident * footprint.step_bytes * max(1, used.stages - 1)
    load_rate = min(CACHE_FACTOR * device.bandwidth / device.units, in_flight / LATENCY_US * 1e6)
    load_us = busiest * footprint.steps * footprint.step_bytes / load_rate * 1e6
    memory_us = footprint.memory_bytes / device.bandwidth * 1e6
    times: tuple[tuple[float, By], ...] = (
        (memory_us, "memory"),
        (load_us, "loads"),
        (compute_us, "compute"),
    )
    us, by = max(times, key=lambda item: item[0])
    least = footprint.needed_flops / rate * 1e6 if rate else 0.0
    return Prediction(
        us=us,
        by=by,
        bound_us=max(memory_us, least),
        waves=footprint.programs / (device.units * held.blocks),
        occupancy=held,
    )
