"""On which architectures a package's configurations were measured. Free of torch.

A configuration that was only read as machine code may be right and slow; a plan says which of its
kernels run with such a one. An entry is made with the measurements that choose the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEASURED: Mapping[str, frozenset[str]] = MappingProxyType({})
"""Package of `hal_kernels` -> architectures ("sm_90")."""


def untuned(package: str, arch: str) -> str:
    """What the package's configurations rest on for an architecture; "" if they were measured."""
    if arch in MEASURED.get(package, frozenset()):
        return ""
    return f"chosen from the machine code for {arch or 'an unknown architecture'}"
