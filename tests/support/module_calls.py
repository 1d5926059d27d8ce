"""Which modules of a model a forward pass calls, and which torch products each of them makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm"})
CHOICES = frozenset({"topk"})


@dataclass
class ModuleCalls:
    """Names of modules that were called; (name of the innermost module, op) -> number."""

    called: set[str] = field(default_factory=set)
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)


class _Watch(TorchDispatchMode):
    def __init__(self, calls: ModuleCalls, stack: list[str]) -> None:
        super().__init__()
        self._calls, self._stack = calls, stack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS or name in CHOICES:
            self._calls.ops[(self._stack[-1] if self._stack else "", name)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def watch_modules(model: torch.nn.Module) -> Iterator[ModuleCalls]:
    """Records what runs inside."""
    calls, stack = ModuleCalls(), list[str]()

    def enter(name: str) -> Any:
        def hook(module: Any, args: Any) -> None:
            calls.called.add(name)
            stack.append(name)

        return hook

    def leave(module: Any, args: Any, output: Any) -> None:
        stack.pop()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name)))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad(), _Watch(calls, stack):
            yield calls
    finally:
        for handle in handles:
            handle.remove()
