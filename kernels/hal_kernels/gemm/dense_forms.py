"""Which configuration of a dense product its rows take: names of tiles, and of what follows it.

Wide tiles of 256x128 ask for a quarter fewer bytes than square ones of 128x128, and are half as
many: they are launched where they take the device no more rounds. Tables have them where
accumulators of twice the size leave as many warps resident, and no form whose registers would spill
beside them, see the evidence. Free of torch and triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import DeviceSpec
from hal.ops.gemm import GemmRequest
from hal_kernels.aot.limits import evidence_of
from hal_kernels.aot.targets import TARGETS, Target
from hal_kernels.gemm.triton_variants import configurations

FEW_ROWS = 16  # rows up to which the weight's bytes decide, and splits of K fill the device
_LEAST_SPLIT_K = 2048  # columns below which a split would leave too little to each
WIDE_ROWS = 512  # from which tiles are wide where nothing is known of the device's multiprocessors


def size_of(rows: int, k: int = 0) -> str:
    """The configuration for so many rows: "large", "small", or "split" where `k` is long."""
    if rows > FEW_ROWS:
        return "large"
    return "split" if k >= _LEAST_SPLIT_K else "small"


def gated_suffix(request: GemmRequest) -> str:
    """What the names of configurations of gated products have more."""
    return "-gated" if request.epilogue == "silu_gated" else ""


def dense_suffix(request: GemmRequest) -> str:
    """What follows a product that is dense, or whose weight alone is quantised, as the names of
    configurations have it. That with a bias and an activation is compiled once, and stands for
    either."""
    follows = request.has_bias or request.epilogue == "silu"
    return gated_suffix(request) or "-bias" * follows


def units_of(device: DeviceSpec) -> int:
    """Multiprocessors as they are stated of a device, 0 where they are not: what is launched and
    what is planned have to agree, so nothing else is asked."""
    return int(device.attributes.get("compute_units", 0))


def known_target(device: DeviceSpec) -> Target | None:
    """The compile target of a device's architecture; None for one that nothing is compiled for."""
    return next((one for one in TARGETS if one.arch == device.arch), None)


def has_wide_tiles(device: DeviceSpec, kernel: str, dtype: str, suffix: str) -> bool:
    """Whether a form of a kernel has wide tiles whose machine code is a fast path on a device."""
    found = evidence_of(kernel, device, dtype, f"wide{suffix}")
    return found is not None and found.tier == "native"


def dense_size(
    target: Target, table: str, units: int, *, rows: int, features: int, k: int, has_wide: bool
) -> str:
    """As `size_of`, or "wide": of a dense product [rows, k] x [features, k].

    table: of configurations. units: multiprocessors of the device, 0 where they are not known; then
    many rows take wide tiles that fill the columns.
    """
    size, tiles = size_of(rows, k), configurations(table, target)
    if size != "large" or not (has_wide and "wide" in tiles) or (not units and rows < WIDE_ROWS):
        return size
    wide, square = tiles["wide"], tiles[size]
    rounds = -(-count_of(wide, rows, features) // max(1, units))
    others = -(-count_of(square, rows, features) // max(1, units))
    return "wide" if rounds * _area(wide) <= others * _area(square) else size


def count_of(tiles: Mapping[str, int], rows: int, features: int) -> int:
    """Tiles of a result [rows, features]."""
    return -(-rows // tiles["BLOCK_M"]) * -(-features // tiles["BLOCK_N"])


def _area(tiles: Mapping[str, int]) -> int:
    return tiles["BLOCK_M"] * tiles["BLOCK_N"]


def whole_size(
    request: GemmRequest, device: DeviceSpec, rows: int, *, table: str, kernel: str, suffix: str
) -> str:
    """`dense_size` of a request. kernel, suffix: of its form, as the catalogue names it."""
    target = known_target(device)
    if target is None:
        return size_of(rows, request.k)
    return dense_size(
        target, table, units_of(device), rows=rows, features=request.out_features, k=request.k,
        has_wide=has_wide_tiles(device, kernel, request.dtype, suffix),
    )  # fmt: skip
