"""Where the intermediate tensors of a replayed step lie: the memory of one that nothing reads any
more is given to the next.

A step that is run call by call gets this from the allocator. In a replay the addresses are fixed,
and tensors that each had memory of their own would not stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A cache line; vectors of the kernels are as wide.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Memory of so many bytes that is used from launch `first` to launch `last`, both included."""

    num_bytes: int
    first: int
    last: int


def place(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets, in the order given, of memory that never overlaps while both are in use, and the
    bytes of all of it. First fit by begin: the result depends on nothing but the arguments."""
    offsets = [0] * len(lifetimes)
    in_use: list[tuple[int, int, int]] = []  # (offset, end, last), by offset
    total = 0
    for index in sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].first, i)):
        wanted = lifetimes[index]
        num_bytes = -(-wanted.num_bytes // ALIGNMENT) * ALIGNMENT
        in_use = [use for use in in_use if use[2] >= wanted.first]
        offset = 0
        for begin, end, _ in in_use:
            if begin - offset >= num_bytes:
                break
            offset = max(offset, end)
        offsets[index] = offset
        in_use.append((offset, offset + num_bytes, wanted.last))
        in_use.sort()
        total = max(total, offset + num_bytes)
    return offsets, total
