"""Intel Gaudi accelerators: which libraries offer candidates for it."""

from __future__ import annotations

from collections.abc import Sequence

from hal.candidates import KernelCandidate
from hal.device import DeviceSpec
from hal_backends.gpu import (
    collectives,
    torch_dense,
    torch_elementwise,
    torch_gemm,
    torch_index,
    torch_latent,
    torch_sdpa,
    triton_kernels,
)
from hal_backends.gpu.offers import Library, from_libraries

LIBRARIES: tuple[Library, ...] = (
    collectives.candidates,
    torch_dense.candidates,
    torch_elementwise.candidates,
    torch_gemm.candidates,
    torch_index.candidates,
    torch_latent.candidates,
    torch_sdpa.candidates,
    triton_kernels.candidates,
)


def candidates_for(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    """Every implementation of `op` for the platform, those that cannot run here included."""
    return from_libraries(LIBRARIES, op, device)
