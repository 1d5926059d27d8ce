"""The work of calls as they were: at the number of tokens and the contexts that they really had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.answers import work_of
from hal.candidates import KernelCandidate, Work
from hal.device import DeviceSpec
from hal.device_group import GroupLink
from hal.ops.attention import AttentionMetadata, AttentionRequest, bytes_of_rows, flops_of_pairs
from hal.ops.collective import CollectiveRequest
from hal.ops.request import OpRequest
from hal.roofline import Bound, needed_work


@dataclass(frozen=True, slots=True)
class CallSize:
    """What the work of a call depends on. pairs, rows: of attention, query-key pairs that are
    scored and rows of keys and values that are read; 0 for other ops."""

    tokens: int
    pairs: int = 0
    rows: int = 0


def size_of(request: OpRequest, tokens: int, args: Sequence[Any]) -> CallSize:
    """The size of one call, from its arguments."""
    if not isinstance(request, AttentionRequest):
        return CallSize(tokens)
    meta = next((arg for arg in args if isinstance(arg, AttentionMetadata)), None)
    if meta is None:
        return CallSize(tokens)
    starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    pairs = rows = 0
    for index, length in enumerate(lengths):
        queries = starts[index + 1] - starts[index]
        pairs += _pairs(request, queries, length)
        rows += min(length, request.window + queries - 1) if request.window else length
    return CallSize(tokens, pairs, rows)


def _pairs(request: AttentionRequest, queries: int, length: int) -> int:
    """Keys that each of the last `queries` tokens of a context of `length` sees, summed."""
    if not request.is_causal:
        return queries * length
    first = length - queries + 1  # keys that the first query sees
    window = request.window or length
    whole = max(0, min(queries, window - first))  # queries whose keys are fewer than the window
    return whole * first + whole * (whole - 1) // 2 + (queries - whole) * min(window, length)


def work_of_call(
    request: OpRequest, size: CallSize, candidate: KernelCandidate | None = None
) -> Work:
    """What the op needs at that size, or what `candidate` says it does instead.

    A candidate's own figures for attention are of the context that estimates assume: they are
    scaled to the real one.
    """
    needed = needed_work(request, size.tokens)
    own = None if candidate is None else work_of(candidate, request, size.tokens)
    work = own or needed
    if not isinstance(request, AttentionRequest) or not size.rows:
        return work
    flops = flops_of_pairs(request, size.pairs)
    moved = bytes_of_rows(request, size.tokens, size.rows)
    return Work(
        flops=work.flops * flops / needed.flops if needed.flops else flops,
        bytes=work.bytes * moved / needed.bytes if needed.bytes else moved,
        unit=work.unit,
    )


def bound_of_work(
    request: OpRequest, work: Work, device: DeviceSpec, link: GroupLink | None
) -> Bound | None:
    """The roofline time of that work; None where a rate it needs is not known."""
    if isinstance(request, CollectiveRequest):
        if link is None or not link.bandwidth_bytes_per_s:
            return None
        us = (link.latency_us or 0.0) + work.bytes / link.bandwidth_bytes_per_s * 1e6
        return Bound(us, "link")
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
