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
threads at once.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hal.loaded_code import LoadedCode, note_loaded_code
from hal_kernels.cpu_intrinsics import (
    atomic_fetch_add,
    call_int,
    call_parallel,
    call_worker,
    pointer_int64,
)
from hal_kernels.cpu_jit import CompiledWorker, compile_runner
from hal_kernels.openmp_runtime import parallel_call, parallel_runtime

# Words of a launch's memory. The last three and the worker's own arguments, which follow, are
# written by every launch; the worker's constants come last. Entries are launches that had items,
# counted by the code that calls the worker: an audit reads them.
_WORKER, _ARGUMENTS, _THREAD_NUM, _ENTRIES, _NEXT_ITEM, _NUM_ITEMS, _GRAIN = range(7)
_HEADER_WORDS = 7

# Words of a launch of two workers, before the two workers' own: see `_run_stages`.
_PARALLEL, _RUN_TEAM, _NUM_THREADS, _STAGES = range(4)
_NUM_STAGES = 2
_STAGES_WORDS = _STAGES + _NUM_STAGES


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
    worker: CompiledWorker, num_arguments: int, constants: tuple[int | torch.Tensor, ...] = ()
) -> Launch:
    """Give ``worker`` its argument memory and return the call.

    The worker sees the launch's ``num_arguments`` arguments first, then ``constants``: numbers,
    addresses whose memory the caller keeps alive, and tensors, seen as the address of their data
    and kept alive by the launch.
    """
    words = (ctypes.c_int64 * (_HEADER_WORDS + num_arguments + len(constants)))()
    header_address = ctypes.addressof(words)
    words[_WORKER] = worker.address
    words[_ARGUMENTS] = header_address + 8 * _HEADER_WORDS
    words[_HEADER_WORDS + num_arguments :] = [
        item.data_ptr() if isinstance(item, torch.Tensor) else item for item in constants
    ]
    _note(worker, words, _ENTRIES)
    held = (worker, constants)  # as a default argument, for as long as the launch lives
    pack = struct.Struct(f"={3 + num_arguments}q").pack_into
    pack_offset = 8 * _NEXT_ITEM
    # A ctypes object as argument saves the conversion that a Python int costs in each call.
    header = ctypes.c_int64(header_address)
    run_here = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_run_here().address)
    runtime, _ = parallel_runtime()

    if runtime is None:

        def launch_here(num_items: int, grain: int, *arguments: int, _held: Any = held) -> None:
            pack(words, pack_offset, 0, num_items, grain, *arguments)
            run_here(header)

        return launch_here

    words[_THREAD_NUM] = runtime.thread_num_address
    parallel = parallel_call(runtime)
    run_team = ctypes.c_int64(_run_team().address)
    no_flags = ctypes.c_uint32(0)
    get_num_threads = torch.get_num_threads

    def launch(num_items: int, grain: int, *arguments: int, _held: Any = held) -> None:
        pack(words, pack_offset, 0, num_items, grain, *arguments)
        if num_items <= grain or (num_threads := get_num_threads()) == 1:
            run_here(header)
        else:
            parallel(run_team, header, num_threads, no_flags)

    return launch


def _note(worker: CompiledWorker, words: Any, index: int) -> None:
    """Tells an audit, if one listens, of the worker and of the word that counts its entries."""
    note_loaded_code(
        LoadedCode(
            symbol=worker.symbol,
            address=worker.address,
            entries=lambda: int(words[index]),
            object_code=worker.object_code,
        )
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker of a `StagedLaunch`; the fields are the arguments of `bind_worker`."""

    worker: CompiledWorker
    num_arguments: int
    constants: tuple[int | torch.Tensor, ...] = ()

    @property
    def num_words(self) -> int:
        return _HEADER_WORDS + self.num_arguments + len(self.constants)


def bind_stages(first: Stage, second: Stage) -> StagedLaunch:
    """Give two workers their argument memory and return the call that runs one after the other."""
    runtime, _ = parallel_runtime()
    start_second = _STAGES_WORDS + first.num_words
    words = (ctypes.c_int64 * (start_second + second.num_words))()
    address = ctypes.addressof(words)
    if runtime is not None:
        words[_PARALLEL], words[_RUN_TEAM] = runtime.parallel_address, _run_team().address
    packs = []
    for index, (stage, start) in enumerate(((first, _STAGES_WORDS), (second, start_second))):
        words[_STAGES + index] = address + 8 * start
        words[start + _WORKER] = stage.worker.address
        words[start + _ARGUMENTS] = address + 8 * (start + _HEADER_WORDS)
        words[start + _THREAD_NUM] = 0 if runtime is None else runtime.thread_num_address
        words[start + _HEADER_WORDS + stage.num_arguments : start + stage.num_words] = [
            item.data_ptr() if isinstance(item, torch.Tensor) else item for item in stage.constants
        ]
        packs.append(struct.Struct(f"={3 + stage.num_arguments}q").pack_into)
        _note(stage.worker, words, start + _ENTRIES)
    held = (first, second)  # as a default argument, for as long as the launch lives
    pack_first, pack_second = packs
    first_offset, second_offset = 8 * (_STAGES_WORDS + _NEXT_ITEM), 8 * (start_second + _NEXT_ITEM)
    header = ctypes.c_int64(address)
    run_stages = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_run_stages().address)
    get_num_threads = torch.get_num_threads if runtime is not None else lambda: 1

    def launch(first: tuple[int, ...], second: tuple[int, ...], _held: Any = held) -> None:
        pack_first(words, first_offset, 0, *first)
        pack_second(words, second_offset, 0, *second)
        words[_NUM_THREADS] = get_num_threads()
        run_stages(header)

    return launch


@functools.cache
def _run_team() -> CompiledWorker:
    """What each thread of the team runs: take items, call the worker, until none is left."""

    def run_team(header_address: int) -> None:
        header = pointer_int64(header_address)
        thread = call_int(header[_THREAD_NUM])
        num_items = header[_NUM_ITEMS]
        grain = header[_GRAIN]
        while True:
            begin = atomic_fetch_add(header_address + 8 * _NEXT_ITEM, grain)
            if begin >= num_items:
                return
            if begin == 0:
                header[_ENTRIES] += 1
            end = min(begin + grain, num_items)
            call_worker(header[_WORKER], header[_ARGUMENTS], begin, end, thread)

    return compile_runner(run_team)


@functools.cache
def _run_here() -> CompiledWorker:
    """Runs the worker over all items on the calling thread."""

    def run_here(header_address: int) -> None:
        header = pointer_int64(header_address)
        if header[_NUM_ITEMS] > 0:
            header[_ENTRIES] += 1
        call_worker(header[_WORKER], header[_ARGUMENTS], 0, header[_NUM_ITEMS], 0)

    return compile_runner(run_here)


@functools.cache
def _run_stages() -> CompiledWorker:
    """Runs the workers of a staged launch one after the other, on the team where it pays."""

    def run_stages(address: int) -> None:
        words = pointer_int64(address)
        num_threads = words[_NUM_THREADS]
        for stage in range(_NUM_STAGES):
            header_address = words[_STAGES + stage]
            header = pointer_int64(header_address)
            num_items = header[_NUM_ITEMS]
            if num_items <= header[_GRAIN] or num_threads == 1:
                if num_items > 0:
                    header[_ENTRIES] += 1
                call_worker(header[_WORKER], header[_ARGUMENTS], 0, num_items, 0)
            else:
                call_parallel(words[_PARALLEL], words[_RUN_TEAM], header_address, num_threads)

    return compile_runner(run_stages)
