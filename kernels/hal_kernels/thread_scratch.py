"""Memory that a kernel needs only while it runs: one buffer a thread, kept for the next call."""

from __future__ import annotations

import threading

import torch

from hal_kernels.cpu_recording import hold

# More is given back when the call ends.
_MOST_KEPT_BYTES = 8 * 2**20


class _Buffer(threading.local):
    memory = torch.empty(0, dtype=torch.uint8)


_buffer = _Buffer()


def thread_scratch(num_bytes: int) -> torch.Tensor:
    """At least ``num_bytes`` uninitialised bytes, aligned to a cache line.

    The next call from the same thread may return the same memory: hold nothing in it across calls
    of other kernels.
    """
    memory = _buffer.memory
    if memory.numel() >= num_bytes:
        hold(memory)
        return memory
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes <= _MOST_KEPT_BYTES:
        _buffer.memory = memory
    return memory
