"""What bound kernels launch, without computing it, beside the variants that targets are compiled
for: whether what limits judge is what runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.variant import KernelVariant


class Launches:
    """Takes a kernel's place: keeps each launch's arguments by name, and computes nothing."""

    def __init__(self, names: list[str], found: list[dict[str, Any]]) -> None:
        self._names, self._found = names, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._found.append(dict(zip(self._names, arguments, strict=False)) | constants)

        return launch


def recorded(
    monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], *kernels: str
) -> dict[str, list[dict[str, Any]]]:
    """function -> what it was launched with, from now on, by whichever of the modules."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kernels}
    for module, name in itertools.product(modules, kernels):
        if hasattr(module, name):
            names = list(getattr(module, name).arg_names)
            monkeypatch.setattr(module, name, Launches(names, found[name]))
    return found


@cache
def compiled(kernel: str, arch: str, dtype: str, config: str) -> KernelVariant:
    """Raises AssertionError if there is no such variant."""
    for variant in CATALOGUE[kernel].variants(find_target(arch)):
        if (variant.dtype, variant.config) == (dtype, config):
            return variant
    raise AssertionError(f"{kernel}: no variant {config} of {dtype} on {arch}")
