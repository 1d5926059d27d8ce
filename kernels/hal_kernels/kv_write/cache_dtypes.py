"""Which e4m3 type dense caches of keys and values have on an architecture, and as what kernels see
it. Free of torch and triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_kernels.aot.targets import Target

if TYPE_CHECKING:
    import torch

# Triton does not convert to e4m3 there, or bit by bit: kernels have the codes as integers.
NO_FP8 = ("sm_80", "gfx90a", "gfx1100")


def fp8_of(arch: str) -> str:
    """torch's name of the e4m3 type of an architecture's dense caches."""
    return "float8_e4m3fnuz" if arch.startswith("gfx94") else "float8_e4m3fn"


def compiled_fp8(target: Target) -> str:
    """What kernels are compiled with for caches of that type."""
    return "uint8" if target.arch in NO_FP8 else target.fp8_dtype


def as_compiled(cache: torch.Tensor, arch: str) -> torch.Tensor:
    """A dense cache as kernels were compiled for it: one of eight bits as integers on `NO_FP8`."""
    import torch

    return cache.view(torch.uint8) if arch in NO_FP8 and cache.element_size() == 1 else cache
