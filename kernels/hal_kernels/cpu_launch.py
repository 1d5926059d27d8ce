"""Runs compiled CPU kernels on torch's own OpenMP threads.

Why not numba's ``parallel=True``: it brings a second thread pool, and torch's threads spin after
each torch op; two pools on the same cores cost more than the kernel itself. Here a kernel is a
plain C function over a range of work items, and ``GOMP_parallel`` of the OpenMP runtime that torch
itself is linked to runs it, so there is one pool per calling thread and ``torch.set_num_threads``
holds for both.

    compiled = compile_worker(worker)
    launch = bind_worker(compiled, num_arguments=3)
    launch(num_items, grain, x.data_ptr(), y.data_ptr(), num_rows)

A launch holds its own argument memory: it is cheap (about 1 µs) and must not be entered by two
threads at once. While its thread records a step, it is noted as well (see `cpu_recording`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from hal_kernels.cpu_fault import Fault
from hal_kernels.cpu_intrinsics import atomic_fetch_add, call_int, call_worker, pointer_int64
from hal_kernels.cpu_jit import CompiledWorker, compile_runner
from hal_kernels.cpu_launch_memory import (
    ARGUMENTS,
    ENTRIES,
    GRAIN,
    NEXT_ITEM,
    NUM_ITEMS,
    THREAD_NUM,
    WORKER,
    LaunchMemory,
    Stage,
)
from hal_kernels.cpu_recording import recording_here, recordings
from hal_kernels.cpu_sequence import SEQUENCE_WORDS, fill_sequence, sequence_call, set_threads
from hal_kernels.openmp_runtime import ParallelRuntime, parallel_call, parallel_runtime


class Launch(Protocol):
    """Runs a bound worker over ``num_items`` items.

    With ``num_items <= grain`` it runs on the calling thread. Otherwise the threads take ``grain``
    items at a time until none is left.
    """

    def __call__(self, num_items: int, grain: int, *arguments: int) -> None: ...


class StagedLaunch(Protocol):
    """Runs one bound worker, then another, each as a `Launch` does.

    Both tuples: (num_items, grain, *arguments). One call costs less than two launches.
    """

    def __call__(self, first: tuple[int, ...], second: tuple[int, ...]) -> None: ...


def bind_worker(
    worker: CompiledWorker,
    num_arguments: int,
    constants: tuple[int | torch.Tensor, ...] = (),
    fault: Fault | None = None,
    addresses: tuple[int, ...] | None = None,
) -> Launch:
    """Give ``worker`` its argument memory and return the call.

    The worker sees the launch's ``num_arguments`` arguments first, then ``constants``: numbers,
    addresses whose memory the caller keeps alive, and tensors, seen as the address of their data
    and kept alive by the launch; then the two addresses of ``fault``, which each launch checks.
    addresses: which arguments are addresses (or 0); a step is captured only if all of its launches
    say so, since a number cannot be told from an address.
    """
    if fault is not None:
        constants = (*constants, *fault.addresses)
    stage = Stage(worker, num_arguments, constants, addresses)
    words = (ctypes.c_int64 * stage.num_words)()
    runtime, _ = parallel_runtime()
    memory = LaunchMemory(words, 0, stage, runtime)
    pack, pack_offset = memory.pack, memory.pack_offset
    # A ctypes object as argument saves the conversion that a Python int costs in each call.
    header = ctypes.c_int64(ctypes.addressof(words))
    run_here = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_run_here().address)
    run_parallel = _parallel_run(runtime, header)
    get_num_threads = torch.get_num_threads if runtime is not None else lambda: 1

    def launch(num_items: int, grain: int, *arguments: int) -> None:
        pack(words, pack_offset, 0, num_items, grain, *arguments)
        if recordings:
            _record(memory, fault)
        if num_items <= grain or (num_threads := get_num_threads()) == 1:
            run_here(header)
        else:
            run_parallel(num_threads)
        if fault is not None:
            fault.check()

    return launch


def _parallel_run(runtime: ParallelRuntime | None, header: ctypes.c_int64) -> Callable[[int], None]:
    """Runs a launch on a team of so many threads."""
    if runtime is None:

        def refuse(num_threads: int) -> None:
            raise RuntimeError(f"launch: {num_threads} threads asked for without an OpenMP runtime")

        return refuse
    parallel = parallel_call(runtime)
    run_team = ctypes.c_int64(_run_team().address)
    no_flags = ctypes.c_uint32(0)
    return lambda num_threads: parallel(run_team, header, num_threads, no_flags)


def _record(memory: LaunchMemory, fault: Fault | None) -> None:
    memory.record()
    recording = recording_here()
    if recording is not None and fault is not None:
        recording.faults[id(fault)] = fault


def bind_stages(first: Stage, second: Stage) -> StagedLaunch:
    """Give two workers their argument memory and return the call that runs one after the other."""
    runtime, _ = parallel_runtime()
    starts = (SEQUENCE_WORDS + 2, SEQUENCE_WORDS + 2 + first.num_words)
    words = (ctypes.c_int64 * (starts[1] + second.num_words))()
    address = ctypes.addressof(words)
    fill_sequence(words, [address + 8 * start for start in starts])
    memories = [
        LaunchMemory(words, start, stage, runtime)
        for start, stage in zip(starts, (first, second), strict=True)
    ]
    pack_first, pack_second = (memory.pack for memory in memories)
    first_offset, second_offset = (memory.pack_offset for memory in memories)
    header = ctypes.c_int64(address)
    run = sequence_call()

    def launch(first: tuple[int, ...], second: tuple[int, ...]) -> None:
        pack_first(words, first_offset, 0, *first)
        pack_second(words, second_offset, 0, *second)
        if recordings:
            for memory in memories:
                memory.record()
        set_threads(words)
        run(header)

    return launch


@functools.cache
def _run_team() -> CompiledWorker:
    """What each thread of the team runs: take items, call the worker, until none is left."""

    def run_team(header_address: int) -> None:
        header = pointer_int64(header_address)
        thread = call_int(header[THREAD_NUM])
        num_items = header[NUM_ITEMS]
        grain = header[GRAIN]
        while True:
            begin = atomic_fetch_add(header_address + 8 * NEXT_ITEM, grain)
            if begin >= num_items:
                return
            if begin == 0:
                pointer_int64(header[ENTRIES])[0] += 1
            end = min(begin + grain, num_items)
            call_worker(header[WORKER], header[ARGUMENTS], begin, end, thread)

    return compile_runner(run_team)


@functools.cache
def _run_here() -> CompiledWorker:
    """Runs the worker over all items on the calling thread."""

    def run_here(header_address: int) -> None:
        header = pointer_int64(header_address)
        if header[NUM_ITEMS] > 0:
            pointer_int64(header[ENTRIES])[0] += 1
        call_worker(header[WORKER], header[ARGUMENTS], 0, header[NUM_ITEMS], 0)

    return compile_runner(run_here)
