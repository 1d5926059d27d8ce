"""Kernels that `torch.compile` generated: which of them are seen, and how.

They are no ops: the code that the compiler writes calls them by name. A kernel for CPUs is a
function among the globals of that code, and is counted and timed there while an audit runs. One
that is launched in another way (Triton's) is only named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from types import ModuleType
from typing import Any, Final

import torch

from hal.auditing.observer import Observer

_CALLED: Final = ("cpp_", "mps_")
_LAUNCHED: Final = ("triton_", "cuda_", "xpu_", "sycl_")
_MODULE: Final = "torch._inductor.codecache"
_MAX_NAMED: Final = 5


class KernelWatch:
    """Installed while an audit runs, as soon as the code generator is imported."""

    def __init__(self, observer: Observer, is_observed: Callable[[], bool]) -> None:
        """is_observed: whether the calling thread is, at this moment."""
        self._observer = observer
        self._is_observed = is_observed
        self._wrapped: list[tuple[ModuleType, str, Any]] = []
        self._launched: dict[str, None] = {}
        self._cache: Any = None
        self._own: Any = None  # the class's own method, unbound

    def install(self) -> None:
        """Wraps the kernels that there are, and from here on each that is loaded."""
        module = sys.modules.get(_MODULE)
        cache: Any = getattr(module, "PyCodeCache", type(None))
        if self._cache is not None or "load_by_key_path" not in vars(cache):
            return
        self._cache, self._own = cache, vars(cache)["load_by_key_path"]
        original = cache.load_by_key_path

        def load_by_key_path(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            self._wrap(loaded)
            return loaded

        cache.load_by_key_path = load_by_key_path
        for known in list(getattr(cache, "modules", ())):
            self._wrap(known)

    def restore(self) -> None:
        """As it was."""
        for module, name, kernel in self._wrapped:
            setattr(module, name, kernel)
        self._wrapped.clear()
        if self._cache is not None:
            self._cache.load_by_key_path = self._own
            self._cache = None

    def notes(self) -> list[str]:
        """Which kernels nobody saw."""
        names = list(self._launched)
        if not names:
            return []
        shown = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
        return [
            f"{len(names)} kernels that the compiler generated were loaded; whether and for how "
            f"long they ran was not seen: {shown}"
        ]

    def _wrap(self, module: Any) -> None:
        if not isinstance(module, ModuleType):
            return
        for name, value in list(vars(module).items()):
            if isinstance(value, type) or getattr(value, "is_hal_audit_wrapper", False):
                continue
            if name.startswith(_CALLED) and callable(value):
                self._wrapped.append((module, name, value))
                setattr(module, name, self._counting(name, value))
            elif name.startswith(_LAUNCHED) and hasattr(value, "run"):
                self._launched[name] = None

    def _counting(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        observer, is_observed = self._observer, self._is_observed

        def counted(*args: Any) -> Any:
            if not (observer.is_active and is_observed()):
                return kernel(*args)
            begin_ns = perf_counter_ns()
            result = kernel(*args)
            time_ns = perf_counter_ns() - begin_ns
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            observer.record_kernel(name, tensors, time_ns, sys._getframe(1))
            return result

        counted.is_hal_audit_wrapper = True  # type: ignore[attr-defined]
        return counted
