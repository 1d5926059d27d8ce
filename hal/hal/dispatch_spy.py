"""Sees every torch op of a thread, and says which of the important ones ran outside a bound op.

Kernels that are not torch ops (generated machine code) do not pass torch's dispatcher; they can
only be reached through the candidate that loads them.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal.auditing.op_classes import is_tracked as is_tracked
from hal.candidates import Kernel


@dataclass(frozen=True, slots=True)
class EscapedCall:
    """A tracked op that ran outside every bound op: its name and the innermost of our frames."""

    op: str
    location: str


class DispatchSpy(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Use as a context manager around the calls; give `wrap` to `BoundOps`.

    leaf_ops: (site, implementation) -> torch ops seen inside it. escaped: tracked ops outside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.leaf_ops: dict[tuple[str, str], Counter[str]] = {}
        self.escaped: list[EscapedCall] = []
        self.num_tracked = 0
        self._inside: list[tuple[str, str]] = []

    def wrap(self, site: str, implementation: str, kernel: Kernel) -> Kernel:
        """`kernel`, marked as the inside of a bound op."""
        key = (site, implementation)
        self.leaf_ops.setdefault(key, Counter())

        def marked(*args: Any) -> Any:
            self._inside.append(key)
            try:
                return kernel(*args)
            finally:
                self._inside.pop()

        return marked

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.name().partition(".")[0]
        if self._inside:
            self.leaf_ops[self._inside[-1]][name] += 1
        if is_tracked(name):
            self.num_tracked += 1
            if not self._inside:
                self.escaped.append(EscapedCall(name, _location()))
            return func(*args, **(kwargs or {}))
        # In inference mode an op made of others (inner, tensordot, …) arrives whole: look inside.
        with self:
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _location() -> str:
    """file:line of the innermost frame that is neither torch's nor of what leads calls to ops."""
    not_callers = (torch.__path__[0], __file__, f"{__file__.rpartition('/')[0]}/integrations/")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(not_callers):
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"
