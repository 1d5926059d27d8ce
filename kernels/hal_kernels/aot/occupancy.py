"""How many warps of a kernel are resident on a multiprocessor, from what its machine code takes.

The arithmetic is that of NVIDIA's occupancy calculator and of LLVM's for AMD. Registers are dealt
out to whole warps in units, on each of the schedulers (SIMDs) of a multiprocessor by itself;
shared memory to whole blocks. The limits of an architecture are data, each with its source
(`occupancy_limits.json`). AMD counts a work-group processor of RDNA as two compute units here, as
the number of compute units of a device does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from hal_kernels.aot.evidence import Evidence
from hal_kernels.located_documents import read_document

_FILE = Path(__file__).with_name("occupancy_limits.json")
Positive = Annotated[int, Field(gt=0, le=1 << 24)]


class ArchitectureLimits(BaseModel):
    """What a multiprocessor (SM, CU) of an architecture holds.

    schedulers: parts with register files of their own, among which warps are divided. registers:
    32-bit ones of the whole multiprocessor; register_unit: how many a warp is given at least and in
    steps of. shared_reserved: bytes of each block that the system takes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    arch: str
    warp_lanes: Positive
    schedulers: Positive
    max_warps: Positive
    max_blocks: Positive
    registers: Positive
    register_unit: Positive
    max_registers: Positive
    shared_bytes: Positive
    shared_unit: Positive
    shared_reserved: Annotated[int, Field(ge=0, le=1 << 20)]
    source: Annotated[str, Field(min_length=10)]


class _LimitsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal["halstack.occupancy-limits/1"] = Field(alias="schema")
    architectures: tuple[ArchitectureLimits, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """blocks, warps: resident on a multiprocessor, 0 where a block does not fit. share: of the most
    warps that it can hold. limited_by: what another block would lack."""

    blocks: int
    warps: int
    share: float
    limited_by: Literal["warps", "blocks", "registers", "shared memory"]

    def describe(self) -> str:
        """ "16 warps (33%, by registers)"."""
        return f"{self.warps} warps ({self.share:.0%}, by {self.limited_by})"


@cache
def occupancy_limits() -> Mapping[str, ArchitectureLimits]:
    """Architecture -> its limits. Raises SettingsError for a file that is not right."""
    found = read_document(_LimitsFile, _FILE)
    return MappingProxyType({entry.arch: entry for entry in found.architectures})


def occupancy_of(
    limits: ArchitectureLimits, *, registers: int, shared_bytes: int, num_warps: int
) -> Occupancy:
    """registers: of one thread; shared_bytes, num_warps: of one block.

    Raises ValueError for counts that are none.
    """
    if registers < 0 or shared_bytes < 0 or num_warps < 1:
        raise ValueError(
            f"occupancy: required registers and bytes of 0 or more and at least one warp, "
            f"found {registers}, {shared_bytes}, {num_warps}"
        )
    a_warp = _rounded(max(1, registers) * limits.warp_lanes, limits.register_unit)
    most = limits.max_warps // limits.schedulers
    per_scheduler = min(most, limits.registers // limits.schedulers // a_warp)
    if registers > limits.max_registers:
        per_scheduler = 0
    shared = _rounded(shared_bytes + limits.shared_reserved, limits.shared_unit)
    rooms: tuple[tuple[int, Literal["warps", "blocks", "registers", "shared memory"]], ...] = (
        (limits.max_warps // num_warps, "warps"),
        (limits.max_blocks, "blocks"),
        (_blocks_on_schedulers(per_scheduler, limits.schedulers, num_warps), "registers"),
        (limits.shared_bytes // shared if shared else limits.max_blocks, "shared memory"),
    )
    blocks, by = min(rooms, key=lambda room: room[0])
    warps = blocks * num_warps
    return Occupancy(blocks=blocks, warps=warps, share=warps / limits.max_warps, limited_by=by)


def occupancy_of_evidence(found: Evidence) -> Occupancy | None:
    """Of stored machine code; None where it does not compile or nothing is known of the
    architecture."""
    limits = occupancy_limits().get(found.target)
    if limits is None or found.error or not found.num_warps:
        return None
    return occupancy_of(
        limits,
        registers=found.registers,
        shared_bytes=found.shared_bytes,
        num_warps=found.num_warps,
    )


def _blocks_on_schedulers(per_scheduler: int, schedulers: int, num_warps: int) -> int:
    """Warps of a block go round the schedulers, so a block of one warp fills one of them by one,
    and one of five fills one by two: what all hold together is dealt out in whole blocks."""
    return per_scheduler * schedulers // num_warps


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
