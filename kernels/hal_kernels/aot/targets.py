"""The architectures that kernels are compiled for without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hal.errors import SettingsError
from hal.suggestions import did_you_mean


@dataclass(frozen=True, slots=True, order=True)
class Target:
    """One architecture as Triton names it. arch: as `DeviceSpec.arch` spells it."""

    arch: str
    backend: Literal["cuda", "hip"]
    warp_size: int

    @property
    def triton_arch(self) -> int | str:
        """What `triton.backends.compiler.GPUTarget` takes: 120, or "gfx942"."""
        return int(self.arch.removeprefix("sm_")) if self.backend == "cuda" else self.arch

    @property
    def fp8_dtype(self) -> str:
        """The e4m3 type whose matrix instruction the architecture would have: gfx94x has the fnuz
        one, everything else the OCP one (https://www.opencompute.org, OCP 8-bit floating point)."""
        return "fp8_e4m3fnuz" if self.arch.startswith("gfx94") else "fp8_e4m3fn"


TARGETS: tuple[Target, ...] = (
    *(Target(f"sm_{n}", "cuda", 32) for n in (80, 89, 90, 100, 103, 120)),
    *(Target(gfx, "hip", 64) for gfx in ("gfx90a", "gfx942", "gfx950")),
    *(Target(gfx, "hip", 32) for gfx in ("gfx1100", "gfx1201")),
)


def find_target(arch: str) -> Target:
    """The target of an architecture. Raises SettingsError if nothing is compiled for it."""
    for target in TARGETS:
        if target.arch == arch:
            return target
    known = [target.arch for target in TARGETS]
    raise SettingsError(
        "kernel target", f"one of {', '.join(known)}", repr(arch), did_you_mean(arch, known)
    )
