"""What bound kernels launch, without computing it, beside the variants that targets are compiled
for: whether what limits judge is what runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.targets import find_target
from hal_kernels.aot.variant import KernelVariant

# Launched without, what the compiled variant has more to do with: it stands for both.
STANDS_FOR_LESS = {"CLAMP": 0.0, "OUT_UE8M0": False, "HAS_BIAS": False, "HAS_SINKS": False}


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


def assert_compiled(launched: Mapping[str, Any], variant: KernelVariant, *names: str) -> None:
    """Every constant of `names` (all, if none are given) and the launch options are compiled."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    for name in names or variant.constants:
        got, want = launched[name], variant.constants[name]
        if name == "CLAMP":  # its value is any
            got = want if got else 0.0
        if name == "EPILOGUE" and variant.constants.get("HAS_BIAS"):
            got = got or (want if want == 1 else 0)  # an activation behind a bias stands for none
        assert got == want or (name in STANDS_FOR_LESS and got == STANDS_FOR_LESS[name]), name
    for name, want in options.items():
        assert launched.get(name, want) == want, name


def assert_types(launched: Mapping[str, Any], variant: KernelVariant, *unused: str) -> None:
    """Every tensor is of the compiled type, but those that a launch has no use for."""
    for name, want in variant.pointers.items():
        if name not in unused:
            found = str(launched[name].dtype).removeprefix("torch.").replace("float8", "fp8")
            assert found == want, name
