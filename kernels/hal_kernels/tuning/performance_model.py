"""An analytic model of a kernel's time, from its grid and what its machine code takes.

It ranks configurations where there is no device, and says what one may lose: it is a model and no
measurement. The busiest multiprocessor decides. It executes its share of the grid; its arithmetic
goes at its share of the peak rate, less where too few warps are resident to fill the schedulers;
its loads go at most at a rate of its own, and all that are busy together at a few times the
memory's bandwidth (what repeats comes from the cache); each step of a loop waits for its operands,
less the deeper the loop is pipelined, and one that is not pipelined multiplies only after that.
What has to come from memory takes its bytes over the bandwidth. The slowest of the four is hidden
by nothing, and of the others a part is not hidden either. The assumed figures below are round and
the same for all devices: they serve ranking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hal.device import DeviceSpec
from hal_kernels.aot.occupancy import Occupancy, occupancy_limits, occupancy_of

LATENCY_US = 0.6
"""Assumed from a load to its value."""
CACHE_FACTOR = 3.0
"""Assumed rate of loads that hit the cache, of all multiprocessors together, over the memory's."""
UNIT_LOAD_RATE = 1e11
"""Assumed bytes a second that one multiprocessor can load: 64 a clock."""
NOT_HIDDEN = 0.1
"""Assumed share of what is not the slowest that is not hidden behind it."""
WARPS_TO_FILL = 2
"""Assumed resident warps of a scheduler that keep its matrix unit busy."""

By = Literal["memory", "loads", "latency", "compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a launch does, its padding included.

    programs: of the grid. flops: of all of them. step_bytes: that one program loads in one step of
    its loop; steps: of one program. memory_bytes: what the memory must deliver and take at least.
    needed_flops: without padding. ahead: steps that can be loaded ahead at most, whatever the depth
    of the pipeline.
    """

    programs: int
    steps: int
    step_bytes: int
    flops: float
    needed_flops: float
    memory_bytes: float
    ahead: int = 64


ONE_AHEAD = 1
"""Of loops that read in each step where the operands are: a further stage of the pipeline then
loads the places ahead and not the operands, as the shared memory of compiled attention shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Of the machine code. stages: of the loop's pipeline. unit: whose peak rate its arithmetic
    has, a key of `DeviceSpec.peak_flops`. unit_share: what its instruction reaches of that rate."""

    registers: int
    shared_bytes: int
    num_warps: int
    stages: int
    unit: str
    unit_share: float = 1.0


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
    in which the grid is executed."""

    us: float
    by: By
    bound_us: float
    waves: float
    occupancy: Occupancy


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
    us, by = _time(footprint, used, device, held, None if rate is None else rate * used.unit_share)
    memory_us = footprint.memory_bytes / device.bandwidth * 1e6
    least = footprint.needed_flops / rate * 1e6 if rate else 0.0
    return Prediction(
        us=us,
        by=by,
        bound_us=max(memory_us, least),
        waves=footprint.programs / (device.units * held.blocks),
        occupancy=held,
    )


def _time(
    footprint: Footprint,
    used: Resources,
    device: DeviceRates,
    held: Occupancy,
    rate: float | None,
) -> tuple[float, By]:
    """Microseconds, and what takes most of them."""
    schedulers = occupancy_limits()[device.arch].schedulers
    busiest = -(-footprint.programs // device.units)
    resident = min(held.blocks, busiest)
    share = footprint.flops / footprint.programs

    def compute_us(blocks: int, together: int) -> float:
        filled = min(1.0, together * used.num_warps / (WARPS_TO_FILL * schedulers))
        return blocks * share / (rate / device.units * filled) * 1e6 if rate else 0.0

    active = min(device.units, footprint.programs)
    load_rate = min(UNIT_LOAD_RATE, CACHE_FACTOR * device.bandwidth / active)
    ahead = min(used.stages - 1, footprint.ahead)
    waiting = (footprint.steps / max(1, ahead) + 1) * LATENCY_US
    if ahead < 1:
        waiting += compute_us(1, 1)
    times: tuple[tuple[float, By], ...] = (
        (footprint.memory_bytes / device.bandwidth * 1e6, "memory"),
        (busiest * footprint.steps * footprint.step_bytes / load_rate * 1e6, "loads"),
        (-(-busiest // resident) * waiting, "latency"),
        (compute_us(busiest, resident), "compute"),
    )
    most, by = max(times, key=lambda item: item[0])
    return most + NOT_HIDDEN * (sum(us for us, _ in times) - most), by
