"""The work of calls as they were: at the number of tokens and the contexts that they really had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.answers import work_of
from hal.candidates import KernelCandidate, Work
from hal.ops.attention import AttentionMetadata, AttentionRequest, bytes_of_rows, flops_of_pairs
from hal.ops.request import OpRequest
from hal.roofline import needed_work


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
