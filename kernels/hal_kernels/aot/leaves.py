"""What a call of an op's Triton kernels ends in, from the catalogue and the stored machine code."""

from __future__ import annotations

import re

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.triton_versions import evidence_for

_FAMILY = re.compile(r"v_[a-z]+|[a-z0-9]+\.[a-z_]+")  # v_mfma, mma.sync, wgmma.mma_async, …


def kernel_functions(op: str) -> tuple[str, ...]:
    """Names of the device kernels of an op; none where none is written."""
    return tuple(kernel.function for kernel in CATALOGUE.values() if kernel.op == op)


def matrix_instructions(op: str, arch: str, triton: str = "") -> tuple[str, ...]:
    """Families of the matrix instructions that the compiled variants contain, sorted. triton: the
    version that is installed; "" if none is known."""
    found = set()
    for kernel in CATALOGUE.values():
        stored = evidence_for(kernel.name, arch, triton).evidence if kernel.op == op else None
        for variant in stored.variants if stored else ():
            family = _FAMILY.match(variant.instruction)
            if family:
                found.add(family[0])
    return tuple(sorted(found))
