"""Which functions are given to `torch.compile`, and which of them run as Python all the same.

By a stance (`torch.compiler.set_stance`), by the environment (TORCH_COMPILE_DISABLE), or because
the backend that was named runs the graph as it is ("eager").
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from hal.auditing.document import Location
from hal.auditing.observer_frames import FrameReader

_RUN_AS_PYTHON: Final = frozenset({"eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager"})
_PACKAGE: Final = "torch._dynamo"
_MAX_CHAIN: Final = 20


class CompileRequests:
    """Installed with the compiler's door."""

    def __init__(
        self, frames: FrameReader, on_eager: Callable[[str, Location | None], None]
    ) -> None:
        """on_eager: told why a function that was to be compiled runs as Python, and where it was
        given to the compiler."""
        self._frames = frames
        self._on_eager = on_eager
        self._patched: list[tuple[ModuleType, str, Any, Any]] = []
        # By the id of the backend object that each request makes; it is kept, so that its id is.
        self._places: dict[int, tuple[Any, Location | None]] = {}

    def install(self, eval_frame: ModuleType) -> None:
        """Wraps what every request and every call of a compiled function pass."""
        self._patch(eval_frame, "_callback_from_stance", self._watching_calls(eval_frame))
        watching = self._watching_requests(getattr(eval_frame, "optimize", None))
        # The package has the function as well: now, or later the one that it finds here.
        for name in (eval_frame.__name__, _PACKAGE):
            self._patch(sys.modules.get(name), "optimize", watching)

    def restore(self) -> None:
        """As it was, also where the package took the wrapped one over."""
        package = sys.modules.get(_PACKAGE)
        for module, name, original, wrapped in self._patched:
            for holder in (module, package):
                if holder is not None and getattr(holder, name, None) is wrapped:
                    setattr(holder, name, original)
        self._patched.clear()
        self._places.clear()

    def _patch(self, module: ModuleType | None, name: str, wrapped: Any) -> None:
        original = getattr(module, name, None)
        if module is not None and original is not None and wrapped is not None:
            self._patched.append((module, name, original, wrapped))
            setattr(module, name, wrapped)

    def _watching_requests(self, original: Callable[..., Any] | None) -> Any:
        if original is None:
            return None

        def optimize(*args: Any, **kwargs: Any) -> Any:
            decorator = original(*args, **kwargs)
            place = self._frames.program_location(sys._getframe(1))
            callback = getattr(decorator, "callback", None)
            if callback is not None:
                backend = _innermost(callback)
                self._places[id(backend)] = (backend, place)
            elif not kwargs.get("disable") and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
                self._on_eager("TORCHDYNAMO_DISABLE=1", place)
            return decorator

        return optimize

    def _watching_calls(self, eval_frame: ModuleType) -> Any:
        original = getattr(eval_frame, "_callback_from_stance", None)
        if original is None:
            return None

        def callback_from_stance(callback: Any) -> Any:
            chosen = original(callback)
            if callable(callback):
                reason = _why_eager(eval_frame, callback, chosen)
                if reason:
                    known = self._places.get(id(_innermost(callback)))
                    here = self._frames.program_location(sys._getframe(1))
                    self._on_eager(reason, here if known is None else known[1])
            return chosen

        return callback_from_stance


def _why_eager(eval_frame: ModuleType, callback: Any, chosen: Any) -> str:
    """ "" for a function that is compiled."""
    if not callable(chosen):
        stance = getattr(eval_frame._stance, "stance", "another")
        return f'torch.compiler.set_stance("{stance}")'
    config = getattr(eval_frame, "config", None)
    if getattr(config, "disable", False):
        is_set = os.environ.get("TORCH_COMPILE_DISABLE") == "1"
        return "TORCH_COMPILE_DISABLE=1" if is_set else "torch._dynamo.config.disable"
    backend = _innermost(callback)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    is_torchs = hasattr(backend, "compiler_name") or "torch." in getattr(backend, "__module__", "")
    if name in _RUN_AS_PYTHON and is_torchs:
        return f'backend="{name}" runs the graph as Python'
    return ""


def _innermost(callback: Any) -> Any:
    """The backend within what dynamo has wrapped around it."""
    for _ in range(_MAX_CHAIN):
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        if inner is None:
            return callback
        callback = inner
    return callback
