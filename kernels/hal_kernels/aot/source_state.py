"""Whether stored machine code is of the source that is here now. Free of torch and triton."""

from __future__ import annotations

from functools import cache

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.evidence import KernelEvidence
from hal_kernels.aot.targets import TARGETS

_TARGETS = {target.arch: target for target in TARGETS}


def outdated(found: KernelEvidence) -> str:
    """Why machine code need not be what the kernel compiles to now; "" where it is of this source.

    Of a kernel or a target that the catalogue does not have there is no source to compare.
    """
    now = _hash_now(found.kernel, found.target)
    if now in ("", found.source_hash):
        return ""
    return (
        f"made from another source of {found.kernel} "
        f"(hal kernels check --kernel {found.kernel} --target {found.target} --update)"
    )


@cache
def _hash_now(kernel: str, arch: str) -> str:
    """The hash of a kernel's source and declarations; what a process imported does not change."""
    known, target = CATALOGUE.get(kernel), _TARGETS.get(arch)
    return "" if known is None or target is None else known.source_hash(target)
