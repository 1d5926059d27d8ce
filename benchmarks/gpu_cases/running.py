"""Runs cases within a time: checks each, times it with what is left of its share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from gpu_cases.case import Bench, Case, CaseMaker
from gpu_cases.judging import error_of, is_within
from gpu_cases.launches import Function, functions_of, names_of, recorded_launches
from gpu_cases.timing import Rates, time_in_turns

# The goals of a kernel: of the library's time, where there is one; else of the copy's bandwidth,
# where the memory decides.
LIBRARY_GOAL, BANDWIDTH_GOAL = 0.9, 0.8
_LEAST_TIMED_S = 0.02
_POISON_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case. Times in microseconds; ratio: of the library's time to ours, above 1
    ours is faster; roofline_us: the least time the device was seen to need for the work. failure:
    what was raised. goal: "met", "missed", or "" where there is none. allowed_s, took_s: its share
    of the time, and what it took."""

    name: str
    kernels: list[str] = field(default_factory=list)
    error: float | None = None
    is_right: bool = False
    ours_us: float | None = None
    theirs_us: float | None = None
    library: str = ""
    ratio: float | None = None
    roofline_us: float | None = None
    goal: str = ""
    failure: str = ""
    library_failure: str = ""
    allowed_s: float = 0.0
    took_s: float = 0.0


def allowance(makers: tuple[CaseMaker, ...], number: int, left_s: float) -> float:
    """Seconds of a case: its share of what is left for itself and all after it."""
    remaining = sum(maker.share for maker in makers[number:])
    return max(0.0, left_s) * makers[number].share / remaining


def run_maker(maker: CaseMaker, bench: Bench, *, allowed_s: float, rates: Rates | None) -> Outcome:
    """Never raises: a kernel that fails is a result. rates: None times nothing."""
    begin = time.monotonic()

    def ended(**fields: object) -> Outcome:
        took_s = time.monotonic() - begin
        return Outcome(allowed_s=allowed_s, took_s=took_s, **fields)  # type: ignore[arg-type]

    try:
        case = maker.make(bench)
        found, launched = _checked_call(case, bench)
        exact = case.exact()
        error = case.judge(found, exact) if case.judge else error_of(found, exact)
        del found, exact
    except Exception as raised:  # noqa: BLE001 - see above
        return ended(name=maker.name, failure=_message(raised))
    names = names_of(launched, maker.kernels)
    fields = {"name": case.name, "kernels": names, "error": error}
    if launched != functions_of(maker.kernels):
        wanted, seen = ", ".join(sorted(maker.kernels)), ", ".join(names) or "none"
        return ended(**fields, failure=f"required launches of {wanted}, found {seen}")
    is_right = is_within(error, case.tolerance)
    if not is_right or rates is None or not case.is_timed:
        return ended(**fields, is_right=is_right)
    left_s = allowed_s - (time.monotonic() - begin)
    try:
        timed = _times(case, rates, max(left_s, _LEAST_TIMED_S))
    except Exception as raised:  # noqa: BLE001 - see above
        return ended(**fields, is_right=True, failure=f"when timed: {_message(raised)}")
    return ended(**fields, is_right=True, **timed)


def _checked_call(case: Case, bench: Bench) -> tuple[object, set[Function]]:
    """The result and the functions that were launched. Memory that the call gets is not a number,
    so that an element that nobody wrote is seen."""
    if not bench.is_dry:
        poison = torch.full((_POISON_BYTES // 4,), float("nan"), device=bench.device)
        del poison
    with recorded_launches() as launched:
        found = case.ours()
        if not bench.is_dry:
            torch.cuda.synchronize()
    return found, launched


def _times(case: Case, rates: Rates, seconds: float) -> dict[str, object]:
    ours = case.timed or case.ours
    fields: dict[str, object] = {"library": case.library if case.theirs else ""}
    calls = [ours]
    if case.theirs is not None:
        try:
            case.theirs()
            torch.cuda.synchronize()
            calls.append(case.theirs)
        except Exception as raised:  # noqa: BLE001 - a library may not have it on this device
            fields["library_failure"] = _message(raised)
    ours_us, *theirs = time_in_turns(calls, seconds=seconds)
    fields["ours_us"] = ours_us
    if theirs:
        fields |= {"theirs_us": theirs[0], "ratio": theirs[0] / ours_us}
    if case.flops or case.bytes_moved:
        fields["roofline_us"] = rates.roofline_us(case.flops, case.bytes_moved, case.rate)
    fields["goal"] = _goal(case, rates, ours_us, theirs[0] if theirs else None)
    return fields


def _goal(case: Case, rates: Rates, ours_us: float, theirs_us: float | None) -> str:
    if theirs_us is not None:
        return "met" if theirs_us >= LIBRARY_GOAL * ours_us else "missed"
    by_memory = rates.roofline_us(0.0, case.bytes_moved, 1.0)
    if not by_memory or by_memory < rates.roofline_us(case.flops, 0.0, case.rate):
        return ""
    return "met" if by_memory >= BANDWIDTH_GOAL * ours_us else "missed"


def _message(raised: Exception) -> str:
    lines = str(raised).strip().splitlines()
    return f"{type(raised).__name__}: {lines[-1] if lines else ''}"[:300]
