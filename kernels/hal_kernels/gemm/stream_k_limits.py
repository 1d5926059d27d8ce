"""Which dense products are shared out evenly over a device, and in which tiles: one answer for what
is launched and for what selection judges.

Of wide and of square tiles those are taken that ask for fewer bytes: wide ones read less of the
operands, and have parts of twice the size. Their steps are as many. Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal_kernels.aot.limits import evidence_of
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.dense_forms import (
    FEW_ROWS,
    count_of,
    dense_suffix,
    known_target,
    size_of,
    units_of,
)
from hal_kernels.gemm.stream_k_schedule import Schedule, stream_k
from hal_kernels.gemm.stream_k_variants import PROGRAMS_PER_UNIT, fix_up_name, sizes_of, tiles_of
from hal_kernels.gemm.triton_variants import configurations

_WIDTH = 2  # bytes of an operand


@dataclass(frozen=True, slots=True)
class Share:
    """How so many rows are shared out. config: as `stream_k_variants` names it. tiles: constants
    and launch options of the product."""

    config: str
    fix_up: str
    schedule: Schedule
    tiles: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StreamK:
    """Of one request on one device. sizes: of the tiles whose machine code is a fast path here."""

    request: GemmRequest
    target: Target
    units: int
    sizes: frozenset[str]

    def share(self, rows: int) -> Share | None:
        """None where the model of waves prefers whole tiles, or split ones."""
        size = "small" if rows <= FEW_ROWS else "large"
        if size not in self.sizes:
            return None
        slots = self.units * PROGRAMS_PER_UNIT[size]
        tiles, steps = self._sizes_of(size, rows)
        splits = configurations(self._table, self.target)[size_of(rows, self.request.k)]["SPLIT_K"]
        schedule = stream_k(tiles, steps, slots, splits=splits)
        if schedule is None:
            return None
        if size == "large" and "wide" in self.sizes:
            tiles, steps = self._sizes_of("wide", rows)
            wide = Schedule(tiles, steps, min(schedule.programs, tiles * steps))
            asked, most = self._asked("wide", wide), self._asked(size, schedule)
            if all(one <= other for one, other in zip(asked, most, strict=True)):
                size, schedule = "wide", wide
        config = size + _suffix(self.request)
        return Share(config, _fix_up(self.request, config), schedule, self._tiles(size))

    @property
    def _table(self) -> str:
        return _table_of(self.request)

    def _tiles(self, size: str) -> Mapping[str, int]:
        return tiles_of(self.target, self._table, size)

    def _sizes_of(self, size: str, rows: int) -> tuple[int, int]:
        tiles = self._tiles(size)
        count = count_of(tiles, rows, self.request.out_features)
        return count, -(-self.request.k // tiles["BLOCK_K"])

    def _asked(self, size: str, schedule: Schedule) -> tuple[int, int]:
        """Multiplications, with those beyond the result's edges, and bytes that the programs ask
        for: operands, and parts in float32, written and read."""
        tiles = self._tiles(size)
        high, wide = tiles["BLOCK_M"], tiles["BLOCK_N"]
        depth = schedule.tiles * schedule.steps * tiles["BLOCK_K"]
        parts = schedule.most_parts * high * wide * 4 * 2
        return depth * high * wide, depth * (high + wide) * _WIDTH + parts


def bind_schedule(request: GemmRequest, device: DeviceSpec) -> StreamK | None:
    """None where nothing is known of how many programs run at a time, or no machine code shows that
    the kernels are a fast path here."""
    target, units = known_target(device), units_of(device)
    if target is None or not units:
        return None
    sizes = frozenset(
        size
        for size in sizes_of(target, _table_of(request), _suffix(request))
        if _is_native(request, device, size)
    )
    return StreamK(request, target, units, sizes) if sizes else None


def _table_of(request: GemmRequest) -> str:
    return "gemm_gated" if request.epilogue == "silu_gated" else "gemm"


def _is_float32(request: GemmRequest) -> bool:
    return request.out_dtype == "float32" != request.dtype


def _suffix(request: GemmRequest) -> str:
    return dense_suffix(request) + "-float32" * _is_float32(request)


def _fix_up(request: GemmRequest, config: str) -> str:
    return fix_up_name(config, request.dtype)


def _is_native(request: GemmRequest, device: DeviceSpec, size: str) -> bool:
    config = size + _suffix(request)
    asked = (
        ("gemm.stream_k", request.dtype, config),
        ("gemm.stream_k_fix_up", "", _fix_up(request, config)),
    )
    found = [evidence_of(kernel, device, dtype, name) for kernel, dtype, name in asked]
    return all(one is not None and one.tier == "native" for one in found)
