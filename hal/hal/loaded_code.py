"""Machine code that a binding loaded: how an audit counts entries into it and reads its bytes.

A kernel that is no torch op passes torch's dispatcher unseen. Whoever binds one reports it here
while it is bound, which costs nothing where nobody listens; calls pay nothing either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCode:
    """A function in machine code that a kernel may enter.

    symbol: dotted, the module that it comes from first ("hal_kernels.norm.cpu.rms_norm"). address:
    of its first instruction. entries: how often it was entered through this binding so far.
    object_code: the ELF object that was linked into this process, b"" where it is not kept.
    """

    symbol: str
    address: int
    entries: Callable[[], int]
    object_code: Callable[[], bytes]


_listening = threading.local()


def note_loaded_code(code: LoadedCode) -> None:
    """Tells whoever listens in this thread that `code` belongs to what is being bound."""
    for heard in getattr(_listening, "lists", ()):
        heard.append(code)


@contextmanager
def recorded_code() -> Iterator[list[LoadedCode]]:
    """The code that is reported in this thread meanwhile."""
    heard: list[LoadedCode] = []
    outer: tuple[list[LoadedCode], ...] = getattr(_listening, "lists", ())
    _listening.lists = (*outer, heard)
    try:
        yield heard
    finally:
        _listening.lists = outer
