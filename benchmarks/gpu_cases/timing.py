"""Times on a device: two calls in turns, and what the device can do at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
_TURNS, _CALLS = 7, 20  # at most, of each
_LEAST_TURNS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """What this device was seen to do: bytes/s of a copy (read and written) and bfloat16 FLOP/s of
    a large product of torch's library."""

    bytes_per_s: float
    flops_per_s: float

    def roofline_us(self, flops: float, bytes_moved: float, rate: float) -> float:
        """The least time of so much work, in microseconds. rate: of the unit, in bfloat16's."""
        return 1e6 * max(bytes_moved / self.bytes_per_s, flops / (self.flops_per_s * rate))


def measured_rates() -> Rates:
    """Takes about a second. The operands are random: zeros run faster than data does."""
    return Rates(_copied_bytes_per_s(), _product_flops_per_s())


def _copied_bytes_per_s() -> float:
    source = torch.randn(1 << 28, device="cuda")
    goal = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: goal.copy_(source), seconds=0.3) * 1e6


def _product_flops_per_s(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return 2.0 * size**3 / time_of(lambda: a @ b, seconds=0.3) * 1e6


def time_of(call: Call, *, seconds: float) -> float:
    """Median microseconds of one call."""
    return time_in_turns([call], seconds=seconds)[0]


def time_in_turns(calls: list[Call], *, seconds: float) -> list[float]:
    """Median microseconds of each call, which take turns; ends after about so many seconds, but
    not before each had three turns of one call."""
    begin = time.monotonic()
    for call in calls:
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    per_call = max((time.monotonic() - begin) / (3 * len(calls)), 1e-6)
    count = int(max(1, min(_CALLS, seconds / (_TURNS * len(calls) * per_call))))
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(_TURNS):
        if turn >= _LEAST_TURNS and time.monotonic() - begin > seconds:
            break
        for number, call in enumerate(calls):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                call()
            last.record()
            last.synchronize()
            times[number].append(first.elapsed_time(last) * 1000 / count)
    return [statistics.median(one) for one in times]
