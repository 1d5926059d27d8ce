"""Where machine code notes that it met an index it must not use, and how that becomes an error.

A worker cannot raise. It leaves such an item out and notes the index; who launched it asks
afterwards. A replayed step (see `cpu_capture`) asks for all its launches at its end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence


class Fault:
    """Two words of memory for one launch. error: makes what is raised from the noted index."""

    def __init__(self, error: Callable[[int], Exception]) -> None:
        self._error = error
        self._is_noted, self._index = ctypes.c_int64(0), ctypes.c_int64(-1)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the word that becomes 1, and of the word for the index: constants of the worker."""
        return ctypes.addressof(self._is_noted), ctypes.addressof(self._index)

    def check(self) -> None:
        """Raises the error if an index was noted since the last time."""
        if (error := self.take()) is not None:
            raise error

    def take(self) -> Exception | None:
        """The error of an index that was noted since the last time."""
        if not self._is_noted.value:
            return None
        self._is_noted.value = 0
        return self._error(self._index.value)


def check_all(faults: Sequence[Fault]) -> None:
    """Raises the first error; what others noted is forgotten, as they ran in the same step."""
    found = [error for fault in faults if (error := fault.take()) is not None]
    if found:
        raise found[0]
