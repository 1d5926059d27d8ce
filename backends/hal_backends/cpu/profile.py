"""Measured GEMM times by instruction set: what ranks candidates of one tier.

A profile is JSON written by `benchmarks/cpu_gemm.py`: {"cpu_flags", "threads", "torch", "rows":
[{"candidate", "n", "k", "rows", "us"}]}, one file per architecture level beside this one. Times of
other shapes are scaled from the nearest measured shape by its number of weights; between measured
row counts they are interpolated. Only the ratio between candidates of one profile matters.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

# A level without a profile of its own takes that of the nearest one below it.
_PROFILE_OF: Mapping[str, str] = {
    "x86_64_amx": "amx",
    "x86_64_avx512_vnni": "amx",
    "x86_64_avx512": "avx2",
    "x86_64_avx2_vnni": "avx2",
    "x86_64_avx2": "avx2",
}


@dataclass(frozen=True, slots=True)
class GemmProfile:
    """times[candidate][(n, k)] = ((rows, µs), …) with rows ascending."""

    name: str
    times: Mapping[str, Mapping[tuple[int, int], tuple[tuple[int, float], ...]]]

    def estimate_us(self, candidate: str, n: int, k: int, rows: int) -> float | None:
        """µs of one call, None where the candidate was not measured."""
        shapes = self.times.get(candidate)
        if not shapes:
            return None
        shape = min(shapes, key=lambda s: (_distance(s, n, k), s))
        scale = (n * k) / (shape[0] * shape[1])
        return _interpolate(shapes[shape], rows) * scale


def _distance(shape: tuple[int, int], n: int, k: int) -> float:
    return abs(math.log(shape[0] / n)) + abs(math.log(shape[1] / k))


def _interpolate(points: tuple[tuple[int, float], ...], rows: int) -> float:
    """Linear between measured row counts; beyond the last one time grows with the rows."""
    if rows <= points[0][0]:
        return points[0][1]
    for (low, low_us), (high, high_us) in itertools.pairwise(points):
        if rows <= high:
            return low_us + (high_us - low_us) * (rows - low) / (high - low)
    return points[-1][1] * rows / points[-1][0]


@functools.cache
def load_profile(arch: str) -> GemmProfile | None:
    """The profile for an architecture level; None if nothing was measured for it."""
    name = _PROFILE_OF.get(arch)
    if name is None:
        return None
    file = resources.files("hal_backends.cpu") / "data" / f"gemm_{name}.json"
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    times: dict[str, dict[tuple[int, int], dict[int, float]]] = {}
    for row in document["rows"]:
        shapes = times.setdefault(str(row["candidate"]), {})
        shapes.setdefault((int(row["n"]), int(row["k"])), {})[int(row["rows"])] = float(row["us"])
    return GemmProfile(
        name=name,
        times={
            candidate: {shape: tuple(sorted(points.items())) for shape, points in shapes.items()}
            for candidate, shapes in times.items()
        },
    )
