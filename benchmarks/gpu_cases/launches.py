"""Which kernels of the catalogue a call launched, as seen where Triton launches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from hal_kernels.aot.catalogue import CATALOGUE

Function = tuple[str, str]  # module and name: two kernels of the catalogue may share one
_OURS = {(kernel.module, kernel.function) for kernel in CATALOGUE.values()}


def functions_of(names: Iterable[str]) -> set[Function]:
    """What is launched for kernels of the catalogue; nothing for a name that it does not have."""
    found = [CATALOGUE[name] for name in names if name in CATALOGUE]
    return {(kernel.module, kernel.function) for kernel in found}


def names_of(functions: set[Function], preferred: Iterable[str] = ()) -> list[str]:
    """The kernels that functions are launched for: of those that share one, the preferred."""
    wanted = sorted(preferred) + sorted(set(CATALOGUE) - set(preferred))
    names: dict[Function, str] = {}
    for name in wanted:
        for function in functions_of([name]) & functions:
            names.setdefault(function, name)
    return sorted(names.values())


@contextmanager
def recorded_launches() -> Iterator[set[Function]]:
    """The functions of the catalogue's kernels that are launched meanwhile."""
    seen: set[Function] = set()
    kinds = (JITFunction, InterpretedFunction)
    plain = [kind.run for kind in kinds]

    def spy(run: Any) -> Any:
        def launch(self: Any, *args: Any, **options: Any) -> Any:
            function = (self.fn.__module__, self.fn.__name__)
            if function in _OURS:
                seen.add(function)
            return run(self, *args, **options)

        return launch

    for kind, run in zip(kinds, plain, strict=True):
        kind.run = spy(run)
    try:
        yield seen
    finally:
        for kind, run in zip(kinds, plain, strict=True):
            kind.run = run
