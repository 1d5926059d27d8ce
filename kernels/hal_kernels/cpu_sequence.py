"""Runs several launches as one call: a team of threads that takes them one after the other.

A team that ends and begins for each launch costs more than threads that wait for each other in
between, and small launches in a row cost no wait at all: the first thread runs them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hal_kernels.cpu_intrinsics import (
    atomic_fetch_add,
    call_int,
    call_parallel,
    call_void,
    call_worker,
    pointer_int64,
)
from hal_kernels.cpu_jit import CompiledWorker, compile_runner
from hal_kernels.cpu_launch_memory import (
    ARGUMENTS,
    ENTRIES,
    GRAIN,
    NEXT_ITEM,
    NUM_ITEMS,
    WORKER,
)
from hal_kernels.openmp_runtime import parallel_runtime

# Words of a sequence, before the addresses of its launches' memory.
_PARALLEL, _RUN_TEAM, _THREAD_NUM, _BARRIER, _NUM_THREADS, _NUM_LAUNCHES = range(6)
SEQUENCE_WORDS = 6


def fill_sequence(words: Any, launches: Sequence[int]) -> None:
    """Writes a sequence into ``words``: of launches whose memory is at these addresses, in order,
    for as many threads as torch has now."""
    runtime, _ = parallel_runtime()
    if runtime is not None:
        words[_PARALLEL], words[_RUN_TEAM] = runtime.parallel_address, _run_on_team().address
        words[_THREAD_NUM], words[_BARRIER] = runtime.thread_num_address, runtime.barrier_address
    set_threads(words)
    words[_NUM_LAUNCHES] = len(launches)
    words[SEQUENCE_WORDS : SEQUENCE_WORDS + len(launches)] = launches


def set_threads(words: Any) -> None:
    """For as many threads as torch has now."""
    words[_NUM_THREADS] = torch.get_num_threads() if parallel_runtime()[0] is not None else 1


def sequence_call() -> Callable[[ctypes.c_int64], None]:
    """Runs the sequence at an address. It releases the interpreter's lock."""
    call: Callable[[ctypes.c_int64], None] = ctypes.CFUNCTYPE(None, ctypes.c_int64)(
        _run_sequence().address
    )
    return call


@functools.cache
def _run_sequence() -> CompiledWorker:
    """On a team if any launch has work for one, else on the calling thread."""

    def run_sequence(address: int) -> None:
        words = pointer_int64(address)
        is_parallel = False
        for index in range(words[_NUM_LAUNCHES]):
            header = pointer_int64(words[SEQUENCE_WORDS + index])
            header[NEXT_ITEM] = 0
            is_parallel = is_parallel or header[NUM_ITEMS] > header[GRAIN]
        if is_parallel and words[_NUM_THREADS] > 1:
            call_parallel(words[_PARALLEL], words[_RUN_TEAM], address, words[_NUM_THREADS])
            return
        for index in range(words[_NUM_LAUNCHES]):
            header = pointer_int64(words[SEQUENCE_WORDS + index])
            if header[NUM_ITEMS] > 0:
                pointer_int64(header[ENTRIES])[0] += 1
                call_worker(header[WORKER], header[ARGUMENTS], 0, header[NUM_ITEMS], 0)

    return compile_runner(run_sequence)


@functools.cache
def _run_on_team() -> CompiledWorker:
    """What each thread of the team runs: the launches in order, small ones on the first thread.

    All threads wait for each other before a launch that is shared, if one ran on the first thread
    since they last did, and behind it.
    """

    def run_on_team(address: int) -> None:
        words = pointer_int64(address)
        barrier = words[_BARRIER]
        thread = call_int(words[_THREAD_NUM])
        is_ahead = False  # the first thread, of the others
        for index in range(words[_NUM_LAUNCHES]):
            header_address = words[SEQUENCE_WORDS + index]
            header = pointer_int64(header_address)
            num_items = header[NUM_ITEMS]
            grain = header[GRAIN]
            if num_items <= grain:
                if thread == 0 and num_items > 0:
                    pointer_int64(header[ENTRIES])[0] += 1
                    call_worker(header[WORKER], header[ARGUMENTS], 0, num_items, 0)
                is_ahead = is_ahead or num_items > 0
                continue
            if is_ahead:
                call_void(barrier)
                is_ahead = False
            while True:
                begin = atomic_fetch_add(header_address + 8 * NEXT_ITEM, grain)
                if begin >= num_items:
                    break
                if begin == 0:
                    pointer_int64(header[ENTRIES])[0] += 1
                end = min(begin + grain, num_items)
                call_worker(header[WORKER], header[ARGUMENTS], begin, end, thread)
            call_void(barrier)

    return compile_runner(run_on_team)
