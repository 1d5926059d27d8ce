"""Marks the inside of bound ops: for the mode that must not see it, and for an audit that must."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hal.candidates import Kernel
from hal.dispatch_spy import DispatchSpy


class KernelMarks:
    """`wrap` goes to `BoundOps`. spy: looks inside kernels while it is set."""

    def __init__(self) -> None:
        self.spy: DispatchSpy | None = None
        self._local = threading.local()

    def is_inside(self) -> bool:
        """Whether this thread is inside a bound op, or in what stands for one."""
        return getattr(self._local, "depth", 0) > 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The body counts as the inside of a bound op."""
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def wrap(self, site: str, implementation: str, kernel: Kernel) -> Kernel:
        """`kernel`, marked."""
        local = self._local

        def marked(*args: Any) -> Any:
            local.depth = getattr(local, "depth", 0) + 1
            try:
                if self.spy is None:
                    return kernel(*args)
                return self.spy.wrap(site, implementation, kernel)(*args)
            finally:
                local.depth -= 1

        return marked
