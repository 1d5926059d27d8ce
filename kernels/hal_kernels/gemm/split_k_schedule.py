"""Split-K: into how many parts along K a product of few rows with a quantised weight is cut.

A decode has one row of tiles: as many programs as there are columns of tiles, each of which walks
all of K. Where these are fewer than the device runs at a time, part of its memory bandwidth lies
idle, and K is cut into parts that a second kernel sums in their order. What decides are the sizes
of the weight and the device's multiprocessors, never the rows: a row does not depend on the others.
Free of torch and triton.
"""

from __future__ import annotations

SPLITS = (4, 8)  # that the sum of parts is compiled for
PROGRAMS_PER_UNIT = (
    2  # which the small tiles leave room for on every architecture: see the evidence
)
LEAST_COLUMNS = 512  # of K, of a part: below, its float32 sums are much beside what it reads


def splits_of(tiles: int, k: int, units: int) -> int:
    """Parts that K is cut into, 1 for none.

    tiles: of the whole product. units: multiprocessors (compute units) of the device; 0 where they
    are not known, and then nothing is cut, as nothing shows that the device is not busy.
    """
    wanted = PROGRAMS_PER_UNIT * units
    allowed = [splits for splits in SPLITS if k >= splits * LEAST_COLUMNS]
    if tiles >= wanted or not allowed:
        return 1
    return next((splits for splits in allowed if tiles * splits >= wanted), allowed[-1])
