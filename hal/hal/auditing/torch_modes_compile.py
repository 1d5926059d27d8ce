"""Keeps compiled functions compiled, and as they were compiled, while a program is observed.

Dynamo guards on the stack of function modes and traces into the modes that it finds. So the
function mode is off whenever dynamo may look at frames: from the entrance of a compiled function to
its end, the parts excepted that dynamo is told to leave alone. The entrance is dynamo's own
`set_eval_frame`. For the same reason `torch.overrides.has_torch_function`, by which
nn.MultiheadAttention and nn.TransformerEncoder choose their fast path, answers as if our mode were
not there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from hal.auditing.compile_requests import CompileRequests
from hal.auditing.mode_stack import put_function_mode, take_function_mode
from hal.auditing.observer import Observer
from hal.auditing.torch_modes import ObservedFunctions

_SETTERS: Final = ("set_eval_frame", "_maybe_set_eval_frame")


class CompilerDoor:
    """Installed while an audit runs, as soon as dynamo is imported."""

    def __init__(
        self,
        observer: Observer,
        functions: ObservedFunctions,
        requests: CompileRequests,
    ) -> None:
        """requests: sees which functions are to be compiled, and which are not after all."""
        self._requests = requests
        self._observer = observer
        self._functions = functions
        self._local = threading.local()
        self._patched: list[tuple[ModuleType, str, Any]] = []
        self._overrides: Any = torch.overrides  # a module is not meant to be assigned to
        self._answer = torch.overrides.has_torch_function
        self._lock = threading.Lock()
        self._num_inside = 0
        self._hidden: list[str] = []

    def install(self) -> None:
        """Patches what can be patched now; called again when dynamo has been imported."""
        self._overrides.has_torch_function = self._has_torch_function
        self.install_in_dynamo()

    def install_in_dynamo(self) -> None:
        """Only where dynamo has been imported: a program without it is left without it."""
        module = sys.modules.get("torch._dynamo.eval_frame")
        if module is None or self._patched:
            return
        self._hide_our_files()
        for name in _SETTERS:
            original = getattr(module, name, None)
            if original is not None:
                self._patched.append((module, name, original))
                setattr(module, name, self._watching(original))
        self._requests.install(module)

    def forget_lock(self) -> None:
        """After a fork: the thread that may have held it is the parent's."""
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Everything as it was."""
        torch.overrides.has_torch_function = self._answer
        for module, name, original in self._patched:
            setattr(module, name, original)
        self._patched.clear()
        self._requests.restore()
        rules = sys.modules.get("torch._dynamo.trace_rules")
        for folder in self._hidden:
            rules.SKIP_DIRS.remove(folder)  # type: ignore[union-attr]
            rules._recompile_re()  # type: ignore[union-attr]
        self._hidden = []

    def _watching(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def set_eval_frame(callback: Any) -> Any:
            if callback is not None:  # before dynamo looks at frames again: ours are none of them
                self._moved(is_inside=True)
                return original(callback)
            prior = original(callback)
            if prior is not None:  # else dynamo is at work, and calls a function of its own
                self._moved(is_inside=False)
            return prior

        return set_eval_frame

    def _hide_our_files(self) -> None:
        """Frames of ours that run where dynamo looks are skipped, not compiled."""
        rules = sys.modules.get("torch._dynamo.trace_rules")
        if rules is not None and hasattr(rules, "add") and not self._hidden:
            rules.add(__package__)
            self._hidden = [rules.SKIP_DIRS[-1]]

    def _moved(self, *, is_inside: bool) -> None:
        """The calling thread went in or out of what dynamo looks at."""
        self._observer.sums().is_inside_dynamo = is_inside
        position = getattr(self._local, "position", None)
        if is_inside and position is None:
            self._local.position = take_function_mode(self._functions)
            if self._local.position is not None:
                self._count(1)
        elif not is_inside and position is not None:
            self._local.position = None
            self._count(-1)
            put_function_mode(self._functions, position)

    def _count(self, step: int) -> None:
        """While any thread is inside, dynamo finds torch's own function."""
        with self._lock:
            self._num_inside += step
            if self._patched:
                self._overrides.has_torch_function = (
                    self._answer if self._num_inside else self._has_torch_function
                )

    def _has_torch_function(self, tensors: Any) -> Any:
        position = take_function_mode(self._functions)
        try:
            return self._answer(tensors)
        finally:
            if position is not None:
                put_function_mode(self._functions, position)
