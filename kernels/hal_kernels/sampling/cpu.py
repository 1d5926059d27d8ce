"""Top-k and top-p filters of logits on the CPU, without a full sort.

A row's logits are counted into bins by their distance from the largest, 64 bins a unit; only the
bin that the k-th largest falls into, and the one where the probability mass reaches top_p, are
sorted. The order is that of the reference: descending, equal logits by ascending index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal_kernels.cpu_intrinsics import (
    pointer_float32,
    pointer_float64,
    pointer_int32,
    pointer_int64,
)
from hal_kernels.cpu_jit import CompiledWorker, compile_worker, worker_helper
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import rows_to_read, vector_to_read
from hal_kernels.cpu_simd import (
    FP32,
    LANES,
    vector_exp,
    vector_largest,
    vector_load,
    vector_load_first,
    vector_max,
    vector_of,
    vector_store,
    vector_store_first,
    vector_sub,
)

_NUM_BINS = 2048
_BINS_PER_UNIT = np.float32(64.0)
_LAST_BIN = np.float32(_NUM_BINS - 1)
_INDEX_MASK = 0xFFFFFFFF


def bind_top_k_top_p(
    *, vocab_size: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Bind the filter of logits.

    The kernel takes logits float32 [B, vocab_size] (rows may be strided), top_k int64 [B]
    (vocab_size is off) and top_p float32 [B] (1 is off), and returns new float32
    [B, vocab_size] with -inf outside the kept set: the k largest (of equal ones the lower index),
    then the shortest prefix of their descending distribution whose probability reaches top_p; at
    least one stays. A NaN stays a NaN, so that the sampler sees it. Masses are summed in float64.

    Machine code: the exponentials and the maximum on zmm (AVX-512) or ymm (AVX2); the counting is
    scalar.

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    if not 0 < vocab_size < 2**31:
        raise ValueError(f"the vocabulary size must be in 1 .. 2**31 - 1, got {vocab_size}")
    launch = bind_worker(_compile_filter(vocab_size), 8)
    # Per thread: each token's weight, the entries of a bin, the bins' masses and counts.
    weights = torch.empty(0, dtype=torch.float32)
    entries = torch.empty(0, dtype=torch.int64)
    bins = torch.empty(0, dtype=torch.float64)

    def top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        nonlocal weights, entries, bins
        logits = rows_to_read("logits", logits, vocab_size, torch.float32)
        top_k = vector_to_read("top_k", top_k, torch.int64)
        top_p = vector_to_read("top_p", top_p, torch.float32)
        num_rows = logits.shape[0]
        out = torch.empty(num_rows, vocab_size, dtype=torch.float32)
        num_threads = torch.get_num_threads()
        if weights.numel() < num_threads * vocab_size:
            weights = torch.empty(num_threads * vocab_size, dtype=torch.float32)
            entries = torch.empty(num_threads * vocab_size, dtype=torch.int64)
            bins = torch.empty(num_threads * 2 * _NUM_BINS, dtype=torch.float64)
        launch(
            num_rows,
            1,
            logits.data_ptr(),
            logits.stride(0),
            top_k.data_ptr(),
            top_p.data_ptr(),
            out.data_ptr(),
            weights.data_ptr(),
            entries.data_ptr(),
            bins.data_ptr(),
        )
        return out

    return top_k_top_p


@worker_helper
def _bin_of(logit: Any, largest: Any) -> Any:
    """Bin of a logit: non-decreasing as the logit falls; the last bin takes the rest."""
    if logit == largest:
        return 0
    distance = (largest - logit) * _BINS_PER_UNIT
    if distance < _LAST_BIN:
        return np.int64(distance)
    return _NUM_BINS - 1


@worker_helper
def _sift_down(heap: Any, start: Any, size: Any) -> None:
    """Restore the heap (smallest on top) below ``start``."""
    root = start
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[root] <= heap[child]:
            return
        swapped = heap[root]
        heap[root] = heap[child]
        heap[child] = swapped
        root = child


@worker_helper
def _sort_bin(row: Any, vocab_size: Any, largest: Any, chosen: Any, entries_address: Any) -> Any:
    """Collect the tokens of bin ``chosen`` in the filter's order; returns their number.

    An entry is the logit's bits, made to order like integers, above the inverted index, so that
    descending entries are descending logits and ascending indices.
    """
    logits = pointer_float32(row)
    bits = pointer_int32(row)
    entries = pointer_int64(entries_address)
    size = 0
    for i in range(vocab_size):
        logit = logits[i]
        if logit == logit and _bin_of(logit, largest) == chosen:
            key = np.int64(bits[i])
            if logit == 0:
                key = np.int64(0)  # -0.0 equals 0.0
            if key < 0:
                key = key ^ np.int64(0x7FFFFFFF)
            entries[size] = key * np.int64(2**32) + (_INDEX_MASK - i)
            size += 1
    for start in range(size // 2 - 1, -1, -1):
        _sift_down(entries, start, size)
    for last in range(size - 1, 0, -1):
        smallest = entries[0]
        entries[0] = entries[last]
        entries[last] = smallest
        _sift_down(entries, 0, last)
    return size


@worker_helper
def _entry_index(entry: Any) -> Any:
    return _INDEX_MASK - (entry & np.int64(_INDEX_MASK))


@functools.cache
def _compile_filter(vocab_size: int) -> CompiledWorker:
    tail = vocab_size % LANES
    full = vocab_size - tail
    minus_infinity = np.float32(-np.inf)

    def top_k_top_p(arguments: int, begin: int, end: int, thread: int) -> None:
        args: Any = pointer_int64(arguments)
        weights_address = args[5] + thread * vocab_size * 4
        entries_address = args[6] + thread * vocab_size * 8
        masses_address = args[7] + thread * 2 * _NUM_BINS * 8
        weights: Any = pointer_float32(weights_address)
        entries: Any = pointer_int64(entries_address)
        masses: Any = pointer_float64(masses_address)
        counts: Any = pointer_float64(masses_address + _NUM_BINS * 8)
        for row in range(begin, end):
            row_address = args[0] + row * args[1] * 4
            logits: Any = pointer_float32(row_address)
            out: Any = pointer_float32(args[4] + row * vocab_size * 4)
            top_k = pointer_int64(args[2])[row]
            top_p = np.float64(pointer_float32(args[3])[row])
            lowest_logit = minus_infinity
            last_index: Any = np.int64(vocab_size)

            maxima = vector_of(minus_infinity)
            for i in range(0, full, LANES):
                maxima = vector_max(vector_load(row_address, i, FP32), maxima)
            if tail > 0:
                rest = vector_load_first(row_address, full, FP32, tail, minus_infinity)
                maxima = vector_max(rest, maxima)
            largest = vector_largest(maxima)

            if (top_k < vocab_size or top_p < 1.0) and largest > minus_infinity:
                for i in range(0, full, LANES):
                    distance = vector_sub(vector_load(row_address, i, FP32), vector_of(largest))
                    vector_store(weights_address, i, vector_exp(distance), FP32)
                if tail > 0:
                    rest = vector_load_first(row_address, full, FP32, tail, minus_infinity)
                    distance = vector_sub(rest, vector_of(largest))
                    vector_store_first(weights_address, full, vector_exp(distance), FP32, tail)
                for b in range(_NUM_BINS):
                    masses[b] = 0.0
                    counts[b] = 0.0
                for i in range(vocab_size):
                    logit = logits[i]
                    if logit == largest:
                        weights[i] = np.float32(1.0)  # also where both are infinite
                    if logit == logit:
                        b = _bin_of(logit, largest)
                        masses[b] += weights[i]
                        counts[b] += 1.0

                last_bin: Any = _NUM_BINS - 1
                last_bin_mass = masses[last_bin]
                num_entries: Any = np.int64(-1)
                if top_k < vocab_size:
                    wanted = np.float64(max(top_k, 1))
                    seen = 0.0
                    for b in range(_NUM_BINS):
                        if seen + counts[b] >= wanted:
                            last_bin = b
                            break
                        seen += counts[b]
                    size = _sort_bin(row_address, vocab_size, largest, last_bin, entries_address)
                    num_entries = min(np.int64(wanted - seen), size)
                    last_bin_mass = 0.0
                    for e in range(num_entries):
                        last_bin_mass += weights[_entry_index(entries[e])]
                    if num_entries > 0:
                        last_index = _entry_index(entries[num_entries - 1])
                        lowest_logit = logits[last_index]
                if top_p < 1.0:
                    total = last_bin_mass
                    for b in range(last_bin):
                        total += masses[b]
                    target = top_p * total
                    mass = 0.0
                    found: Any = np.int64(-1)
                    for b in range(last_bin + 1):
                        bin_mass = last_bin_mass if b == last_bin else masses[b]
                        if counts[b] > 0 and mass + bin_mass >= target:
                            found = b
                            break
                        mass += bin_mass
                    if found >= 0:
                        if found != last_bin or num_entries < 0:
                            num_entries = _sort_bin(
                                row_address, vocab_size, largest, found, entries_address
                            )
                        for e in range(num_entries):
                            last_index = _entry_index(entries[e])
                            mass += weights[last_index]
                            if mass >= target:
                                break
                        lowest_logit = logits[last_index]

            for i in range(vocab_size):
                logit = logits[i]
                is_outside = logit < lowest_logit or (logit == lowest_logit and i > last_index)
                out[i] = minus_infinity if is_outside else logit

    return compile_worker(top_k_top_p)
