"""Memory for packed weights, on huge pages where the system gives them.

A weight is read once a token, from memory: with pages of 4 KiB every 64th cache line needs an
address translation, and the hardware's prefetcher stops at each page's end. Single weights are too
small for pages of 2 MiB, so they share mappings.
"""

from __future__ import annotations

import math
import mmap
import threading

import torch

_MAPPING_BYTES = 64 * 2**20
_CACHE_LINE_BYTES = 64


class _Mappings:
    """Hands out pieces of private mappings. A mapping lives as long as a tensor in it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised bytes, aligned to a cache line."""
        with self._lock:
            if self._used + num_bytes > self._current.numel():
                self._current, self._used = _new_mapping(max(num_bytes, _MAPPING_BYTES)), 0
            start = self._used
            self._used += -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
            return self._current[start : start + num_bytes]


def _new_mapping(num_bytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    # Private: shared mappings get huge pages only where the system is configured so. Pages exist
    # once they are written.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_mappings = _Mappings()


def place_weight(weight: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``weight``, of any strides, in memory for weights."""
    num_bytes = math.prod(weight.shape) * weight.element_size()
    if not num_bytes:
        return weight.contiguous()
    return _mappings.take(num_bytes).view(weight.dtype).view(weight.shape).copy_(weight)
