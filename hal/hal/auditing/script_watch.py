"""TorchScript: which ops run within a scripted function, whose frames Python does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hal.auditing.observer import Observer
from hal.auditing.own_frames import without_ours


class ScriptWatch:
    """Marks the calling thread while a scripted function or method runs."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._originals: dict[Any, Any] = {}

    def install(self) -> None:
        """Wraps the calls of torch's two script types."""
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            original = kind.__call__
            self._originals[kind] = original
            kind.__call__ = self._marking(original)  # type: ignore[method-assign]

    def restore(self) -> None:
        """As it was."""
        for kind, original in self._originals.items():
            kind.__call__ = original
        self._originals.clear()

    def _marking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        observer = self._observer

        def __call__(script: Any, *args: Any, **kwargs: Any) -> Any:
            if not observer.is_active:
                return original(script, *args, **kwargs)
            sums = observer.sums()
            sums.script_depth += 1
            try:
                return original(script, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = without_ours(error.__traceback__)
                raise
            finally:
                sums.script_depth -= 1

        return __call__
