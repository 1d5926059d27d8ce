"""Runs cases within a time: checks each, times it with what is left of its share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gpu_cases.case import Bench, Case, CaseMaker
from gpu_cases.judging import error_of, is_within, tensors_of
from gpu_cases.launches import Function, functions_of, names_of, recorded_launches
from gpu_cases.timing import Rates, time_in_turns

# The goals of a kernel: of the library's time, where there is one; else of the copy's bandwidth,
# where the memory decides.
LIBRARY_GOAL, BANDWIDTH_GOAL = 0.9, 0.8
_LEAST_TIMED_S = 0.02
_POISON_BYTES = 1 << 28
# NaN as bfloat16, float16, float32 and float64, NaN beside -448 as e4m3, and as an integer neither
# 0 nor the -1 that pads lists.
_NO_NUMBER = (0xFE, 0xFF)
_HOLES = (1 << 20, 1 << 16, 1 << 12, 1 << 9)  # bytes, down to the allocator's unit
_LEAST_HELD = 64  # of each


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
    """The result and the functions that were launched. On a GPU memory that the call gets is not a
    number, so that an element that nobody wrote is seen."""
    if bench.is_dry:
        with recorded_launches() as launched:
            return case.ours(), launched
    sizes = [tensor.nbytes for tensor in tensors_of(case.ours())]  # compiles its kernels as well
    torch.cuda.synchronize()
    if case.is_captured:
        return _replayed(case)
    _poison(sizes, bench.device)
    with recorded_launches() as launched:
        found = case.ours()
        torch.cuda.synchronize()
    return found, launched


def _replayed(case: Case) -> tuple[object, set[Function]]:
    """What a replay of the captured call leaves, and the functions that were captured."""
    graph = torch.cuda.CUDAGraph()
    with recorded_launches() as launched, torch.cuda.graph(graph):
        found = case.ours()
    for tensor in tensors_of(found):  # capturing ran nothing: only the replay may write here
        _spoil(tensor)
    graph.replay()
    torch.cuda.synchronize()
    return found, launched


def _poison(sizes: Sequence[int], device: torch.device) -> None:
    """Leaves no free memory in torch's allocator that holds what an earlier call computed.

    Free segments are returned; holes in the others are filled from the largest to the smallest,
    results' own sizes first, because an allocation takes the smallest hole that it fits in.
    """
    torch.cuda.empty_cache()
    wanted = sorted((size for size in sizes if size), reverse=True)
    held = [_spoiled(size, device) for size in wanted for _ in range(_copies(size))]
    held += [_spoiled(size, device) for size in _HOLES for _ in range(_LEAST_HELD)]
    held.append(_spoiled(_POISON_BYTES, device))
    del held


def _copies(size: int) -> int:
    """How often memory of a result's size is held: as often as a small hole, if that is little."""
    return max(1, min(_LEAST_HELD, _POISON_BYTES // size))


def _spoiled(size: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    _spoil(memory)
    return memory


def _spoil(tensor: torch.Tensor) -> None:
    """Fills a tensor with what is not a number."""
    if not tensor.is_contiguous():
        other = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        _spoil(other)
        tensor.copy_(other)
        return
    memory = tensor.view(-1).view(torch.uint8)
    for place, byte in enumerate(_NO_NUMBER):
        memory[place :: len(_NO_NUMBER)] = byte


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
