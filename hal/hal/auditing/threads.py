"""Threads that begin while a program is observed: torch's modes are of a thread, so each gets its
own. Threads that were there before are named, because nobody can reach into them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

_OURS: Final = "hal-"


def _is_idle(thread: threading.Thread) -> bool:
    """Whether a thread never calls torch: ours, and the one that refreshes progress bars."""
    return thread.name.startswith(_OURS) or type(thread).__module__.startswith("tqdm.")


class ThreadWatch:
    """Wraps what every `threading.Thread` begins with; executors use such threads too."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[Any], None]) -> None:
        """begin: called in each new thread; its result goes to `end` when the thread ends."""
        self._begin = begin
        self._end = end
        self._original: Callable[[threading.Thread], None] | None = None
        self.before: tuple[str, ...] = ()

    def install(self) -> None:
        """From here on new threads are observed."""
        current = threading.current_thread()
        self.before = tuple(
            thread.name
            for thread in threading.enumerate()
            if thread is not current and not _is_idle(thread)
        )
        original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        self._original = original
        begin, end = self._begin, self._end

        def _bootstrap_inner(thread: threading.Thread) -> None:
            handle = begin()
            try:
                original(thread)
            finally:
                end(handle)

        threading.Thread._bootstrap_inner = _bootstrap_inner  # type: ignore[attr-defined]

    def restore(self) -> None:
        """Threads that begin later are not observed; those that run notice at their next op."""
        if self._original is not None:
            threading.Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]
            self._original = None
