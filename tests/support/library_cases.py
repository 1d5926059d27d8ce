"""Devices with every library installed, one candidate by its name, and closeness of results."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal_backends.gpu.software import TESTED_VERSIONS

BOUND = 2e-2  # of bfloat16, relative to the largest value


def device(backend: str, arch: str, *features: str) -> DeviceSpec:
    """A device with a 16-bit matrix unit, Triton, these features and all libraries."""
    return DeviceSpec(
        device_id="x",
        vendor=backend,
        backend=backend,
        name=arch,
        arch=arch,
        torch_device="cuda",
        features=frozenset({"matrix.bfloat16", "triton", *features}),
        software=TESTED_VERSIONS,
    )


HOPPER = device("nvidia", "sm_90", "matrix.fp8_e4m3fn")
CDNA4 = device("amd", "gfx950", "matrix.fp8_e4m3fn")


def one(candidates: Iterable[KernelCandidate], name: str) -> KernelCandidate:
    """The candidate whose name ends so. Raises ValueError if there is not exactly one."""
    (found,) = (c for c in candidates if c.name.endswith(f".{name}"))
    return found


def close(got: torch.Tensor, want: torch.Tensor, what: str, bound: float = BOUND) -> None:
    """Equal up to `bound` of the largest value, and not finite in the same places."""
    seen = want.isfinite()
    assert torch.equal(got.isfinite(), seen), what
    error = (got.double() - want)[seen].abs().max() / want[seen].abs().max()
    assert error < bound, (what, float(error))
