"""How a rank's buffer is divided: the same on all ranks, from the size of the largest message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["one_shot", "two_shot", "reduce_scatter", "all_gather"]

BLOCK = 2048  # elements of a tile: 16 bytes of bfloat16 for each of 256 threads
_THREADS = BLOCK // 8
# Columns of a row with its norm that is not held in registers. With more one direction spills on
# sm_90 or sm_100: see the evidence.
LOOPED_BLOCK = 2048
WIRE_GROUP = 128  # elements that share a scale on the wire
MOST_PROGRAMS = 32  # fewer than the multiprocessors of every target, so that all are resident
_PHASES = 2
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """Sizes in bytes but for `slot_elements` (room of one source or owner in a half, a multiple of
    a tile) and `programs` (always launched, by every call)."""

    slot_elements: int
    programs: int
    scale_offset: int
    result_offset: int
    half_bytes: int
    flag_offset: int
    total_bytes: int


def buffer_layout(
    algorithm: Algorithm,
    world_size: int,
    most_elements: int,
    *,
    element_bytes: int,
    wire_bytes: int = 0,
    row_block: int = 0,
) -> BufferLayout:
    """For messages of at most `most_elements` a rank. of reduce_scatter: of its whole input.

    wire_bytes: of an element on the wire, 0 for its own dtype. row_block: elements a row takes
    where a tile is a row (fused norm), most_elements then counts padded rows.
    """
    tile = row_block or BLOCK
    parts = algorithm in ("two_shot", "reduce_scatter")
    part = -(-most_elements // world_size) if parts else most_elements
    # A part of a flat message is a multiple of 8 elements, which may add a few to the last one.
    slot = _up(part + (8 if algorithm == "two_shot" else 0), tile)
    slots = slot * world_size  # pushed, or in parts for each reader; pulled whole takes fewer
    staged = _up(slots * (wire_bytes or element_bytes), _ALIGNMENT)
    scales = _up(slots // WIRE_GROUP * 4, _ALIGNMENT) if wire_bytes else 0
    results = slots * element_bytes if algorithm == "two_shot" else 0
    half = _up(staged + scales + results, _ALIGNMENT)
    programs = max(1, min(MOST_PROGRAMS, -(-slot // tile)))
    flags = _PHASES * programs * world_size * 4
    return BufferLayout(
        slot_elements=slot,
        programs=programs,
        scale_offset=staged,
        result_offset=staged + scales,
        half_bytes=half,
        flag_offset=2 * half,
        total_bytes=_up(2 * half + flags, _ALIGNMENT),
    )


def num_warps(warp_size: int) -> int:
    """Of a tile: every thread moves 16 bytes of a 16-bit dtype."""
    return _THREADS // warp_size


def norm_warps(row_block: int, warp_size: int) -> int:
    """Of a row with its norm: 16 elements a thread, as far as a block has threads. With 8, ptxas
    keeps sm_80 and sm_89 to 32 and 40 registers and spills one of them: see the evidence."""
    return max(4, min(1024, row_block // 16) // warp_size)


def norm_row_block(width: int, most_in_registers: int) -> int:
    """Elements of a half that a row with its norm takes: a tile, or so many of `LOOPED_BLOCK`."""
    if width > most_in_registers:
        return _up(width, LOOPED_BLOCK)
    return 1 << max(0, width - 1).bit_length()


def part_elements(num_elements: int, world_size: int) -> int:
    """Elements of a flat message that one rank sums: a multiple of 8, so that parts are aligned."""
    return _up(-(-num_elements // world_size), 8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
