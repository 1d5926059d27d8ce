"""Which tiles a Triton product is launched with for its rows, and over how many programs."""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import DeviceSpec
from hal_kernels.aot.targets import Target
from hal_kernels.gemm.triton_limits import size_of
from hal_kernels.gemm.triton_variants import configurations


def target_of(device: DeviceSpec) -> Target:
    """The architecture of a device as a compile target."""
    warp = int(device.attributes.get("warp_size", 32))
    return Target(device.arch, "hip" if device.arch.startswith("gfx") else "cuda", warp)


def pick(table: str, target: Target, rows: int, k: int = 0) -> dict[str, int]:
    """The configuration for so many rows; splits of K only where K is long."""
    found: Mapping[str, Mapping[str, int]] = configurations(table, target)
    return dict(found[size_of(rows, k)])


def grid_of(config: Mapping[str, int], rows: int, features: int) -> int:
    return -(-rows // config["BLOCK_M"]) * -(-features // config["BLOCK_N"])
