"""Notes the launches of a step while they run, so that they can be run again: see `cpu_capture`.

A recording belongs to the thread that makes it; launches of other threads are not in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hal_kernels.cpu_fault import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLaunch:
    """One run of a worker. words: the launch's memory as it was (see `cpu_launch_memory`).
    addresses: which of them are addresses that the call gave, or 0; None if nobody says. owner:
    what keeps the worker's code and constants alive."""

    words: tuple[int, ...]
    addresses: tuple[int, ...] | None
    owner: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMemory:
    """Addresses from `begin` to `end` that launches from number `since` on may be given.

    kept: the tensor that they are of, which stays where it is. None: the step made it for itself;
    it may be gone, and its addresses another one's, before the step ends.
    """

    since: int
    begin: int
    end: int
    kept: torch.Tensor | None


@dataclass(slots=True)
class Recording:
    """What was launched, in order. faults: of the launches, each once. memory: what launches read
    or write, in the order in which it came up."""

    launches: list[RecordedLaunch] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)
    memory: list[RecordedMemory] = field(default_factory=list)

    def add_memory(self, tensor: torch.Tensor, *, is_kept: bool) -> None:
        """The storage of `tensor`, for the launches to come."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        self.memory.append(
            RecordedMemory(
                since=len(self.launches),
                begin=begin,
                end=begin + storage.nbytes(),
                kept=tensor if is_kept else None,
            )
        )


# By thread. Empty nearly always: a launch asks with one test.
recordings: dict[int, Recording] = {}


def recording_here() -> Recording | None:
    """The recording of this thread, if it makes one."""
    return recordings.get(threading.get_ident())


def hold(memory: torch.Tensor) -> None:
    """Keeps a kernel's own memory alive for as long as what is recorded now can be replayed. Called
    before the launch that is given it."""
    if recordings and (recording := recording_here()) is not None:
        recording.add_memory(memory, is_kept=True)


@contextmanager
def recorded_launches() -> Iterator[Recording]:
    """The launches of this thread meanwhile. Raises RuntimeError inside another recording."""
    thread = threading.get_ident()
    if thread in recordings:
        raise RuntimeError("capture: required one recording at a time, found one within another")
    recordings[thread] = Recording()
    try:
        yield recordings[thread]
    finally:
        del recordings[thread]
