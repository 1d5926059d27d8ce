"""Devices for which Triton kernels are bound, while the interpreter runs them on the host."""

from __future__ import annotations

from hal.device import DeviceSpec


def gpu(arch: str) -> DeviceSpec:
    """A device of that architecture with nothing that limits a kernel."""
    warp = 64 if arch in ("gfx90a", "gfx942", "gfx950") else 32
    return DeviceSpec(
        device_id="gpu:0",
        vendor="test",
        backend="test",
        name=arch,
        arch=arch,
        torch_device="cpu",
        features=frozenset({"triton"}),
        attributes={"warp_size": warp},
    )
