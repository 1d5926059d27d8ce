"""The memory of a launch: what the code that runs a worker reads, and what the worker reads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hal.loaded_code import LoadedCode, note_loaded_code
from hal_kernels.cpu_jit import CompiledWorker
from hal_kernels.cpu_recording import RecordedLaunch, recording_here
from hal_kernels.openmp_runtime import ParallelRuntime

# Words of a launch's memory. The last three and the worker's own arguments, which follow, are
# written by every launch; the worker's constants come last. Entries is the address of the number of
# launches that had items, counted by the code that calls the worker: an audit reads it.
WORKER, ARGUMENTS, THREAD_NUM, ENTRIES, NEXT_ITEM, NUM_ITEMS, GRAIN = range(7)
HEADER_WORDS = 7


@dataclass(frozen=True, slots=True)
class Stage:
    """A worker of a `StagedLaunch`; the fields are the arguments of `bind_worker`."""

    worker: CompiledWorker
    num_arguments: int
    constants: tuple[int | torch.Tensor, ...] = ()
    addresses: tuple[int, ...] | None = None

    @property
    def num_words(self) -> int:
        return HEADER_WORDS + self.num_arguments + len(self.constants)


class LaunchMemory:
    """Header, arguments and constants of one worker: ``words`` from ``start`` on."""

    def __init__(
        self, words: Any, start: int, stage: Stage, runtime: ParallelRuntime | None
    ) -> None:
        self._words, self._start, self._stage = words, start, stage
        entries = ctypes.c_int64(0)
        self._held = (words, stage, entries)
        self._addresses: tuple[int, ...] | None = None
        if stage.addresses is not None:
            self._addresses = tuple(HEADER_WORDS + index for index in stage.addresses)
        words[start + WORKER] = stage.worker.address
        words[start + ARGUMENTS] = ctypes.addressof(words) + 8 * (start + HEADER_WORDS)
        words[start + THREAD_NUM] = 0 if runtime is None else runtime.thread_num_address
        words[start + ENTRIES] = ctypes.addressof(entries)
        first_constant = start + HEADER_WORDS + stage.num_arguments
        words[first_constant : start + stage.num_words] = [
            item.data_ptr() if isinstance(item, torch.Tensor) else item for item in stage.constants
        ]
        _note(stage.worker, entries)
        self.pack: Callable[..., None] = struct.Struct(f"={3 + stage.num_arguments}q").pack_into
        self.pack_offset = 8 * (start + NEXT_ITEM)

    def record(self) -> None:
        """Notes the launch that is packed, if this thread records."""
        recording = recording_here()
        if recording is None or not self._words[self._start + NUM_ITEMS]:
            return
        recording.launches.append(
            RecordedLaunch(
                words=tuple(self._words[self._start : self._start + self._stage.num_words]),
                addresses=self._addresses,
                owner=self._held,
            )
        )


def _note(worker: CompiledWorker, entries: ctypes.c_int64) -> None:
    """Tells an audit, if one listens, of the worker and of the word that counts its entries."""
    note_loaded_code(
        LoadedCode(
            symbol=worker.symbol,
            address=worker.address,
            entries=lambda: int(entries.value),
            object_code=worker.object_code,
        )
    )


def relocate_launch(words: Any, start: int) -> int:
    """Makes a launch's memory that was copied to ``words[start:]`` its own; returns its address."""
    address = ctypes.addressof(words) + 8 * start
    words[start + ARGUMENTS] = address + 8 * HEADER_WORDS
    words[start + NEXT_ITEM] = 0
    return address
