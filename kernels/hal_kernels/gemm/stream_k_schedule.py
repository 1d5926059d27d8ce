"""Stream-K: whether a product's steps are shared out evenly over the device, and to whom.

A product has tiles of the result, each of so many steps along K. Whole tiles leave part of the
device idle in the last wave; here every program gets the same number of steps, whatever tiles they
fall in (https://arxiv.org/abs/2301.03598). A tile that several programs worked on is summed by a
second kernel in the order of its steps, so that the result does not depend on who comes first.
This is the arithmetic of `stream_k_kernels`, in plain Python. Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# What a second kernel and the parts in memory cost, in steps of one program: a step of any of the
# tiles takes about 1 µs of a multiprocessor's share of bandwidth or arithmetic, a launch some.
FIX_UP_STEPS = 4
LEAST_GAIN = 0.9  # of the time of whole tiles; a model, so a small gain decides nothing
_LEAST_STEPS = 2  # of a program, below which its part of the result costs more than it saves


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [first, last) of a tile, by one program. slot: where its part goes; None: the program
    has all steps of the tile, and stores the result itself."""

    tile: int
    first: int
    last: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """`tiles` tiles of `steps` steps each over `programs` programs, at most as many as steps."""

    tiles: int
    steps: int
    programs: int

    @property
    def most_parts(self) -> int:
        """Parts of tiles at most: programs that begin at the first step of a tile cut none."""
        cuts = self.programs - 1
        return min(2 * cuts, self.tiles + cuts)

    def begin_of(self, program: int) -> int:
        """Number of the first step of a program, counted over all tiles."""
        total = self.tiles * self.steps
        return program * (total // self.programs) + min(program, total % self.programs)

    def program_of(self, step: int) -> int:
        """The program that has a step, counted over all tiles."""
        share, more = divmod(self.tiles * self.steps, self.programs)
        if step < more * (share + 1):
            return step // (share + 1)
        return more + (step - more * (share + 1)) // share

    def segments(self, program: int) -> Iterator[Segment]:
        """What a program does, in its order: at most two of its segments are parts of a tile."""
        begin, end = self.begin_of(program), self.begin_of(program + 1)
        for tile in range(begin // self.steps, -(-end // self.steps)):
            first = max(begin - tile * self.steps, 0)
            last = min(end - tile * self.steps, self.steps)
            is_whole = first == 0 and last == self.steps
            yield Segment(tile, first, last, None if is_whole else 2 * program + (first == 0))

    def parts_of(self, tile: int) -> tuple[int, ...]:
        """Slots whose parts make a tile, in the order of its steps; none if one program has it."""
        first = self.program_of(tile * self.steps)
        last = self.program_of((tile + 1) * self.steps - 1)
        if first == last:
            return ()
        return tuple(2 * program + (program == first) for program in range(first, last + 1))


def stream_k(tiles: int, steps: int, slots: int, *, splits: int = 1) -> Schedule | None:
    """The schedule where the wave model prefers it; None for whole tiles, or split ones.

    slots: programs that the device runs at a time. splits: parts of K, of each tile, that the
    alternative would be launched with. Times are counted in steps of a program.
    """
    whole = -(-tiles * splits // slots) * -(-steps // splits)
    fix_up = 0 if splits == 1 else FIX_UP_STEPS
    total = tiles * steps
    programs = min(slots, total // _LEAST_STEPS)
    if programs < 1:
        return None
    even = -(-total // programs) + FIX_UP_STEPS
    if even > LEAST_GAIN * (whole + fix_up):
        return None
    return Schedule(tiles, steps, programs)
