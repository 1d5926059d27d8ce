"""Which tiles a Triton product is launched with for its rows, and over how many programs."""

from __future__ import annotations

from collections.abc import Mapping

from hal.device import DeviceSpec
from hal_kernels.aot.targets import Target


def target_of(device: DeviceSpec) -> Target:
    """The architecture of a device as a compile target."""
    warp = int(device.attributes.get("warp_size", 32))
    return Target(device.arch, "hip" if device.arch.startswith("gfx") else "cuda", warp)


def grid_of(config: Mapping[str, int], rows: int, features: int) -> int:
    return -(-rows // config["BLOCK_M"]) * -(-features // config["BLOCK_N"])
