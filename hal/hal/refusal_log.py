"""Remembers every error of ours, and tells one that stopped something from one that was swallowed.

An error notes itself when it is made. When it dies, or when somebody asks, its traceback says who
caught it: the outermost frame that it reached, those of the standard library aside. Was that a
frame of halstack, then halstack handled or reported it; was it anybody else's, the program went on
in spite of the refusal. The log keeps texts, never an error or a traceback, and a bounded number.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final

OUR_PACKAGES: Final = frozenset(
    {"hal", "hal_backends", "hal_capability_db", "hal_engine", "hal_kernels"}
)
MAX_KEPT: Final = 256
"""Different refusals that are remembered, the latest; of older ones, only how many."""
# Executors, tasks and runners of the standard library only carry an error to who asks for it.
_STANDARD = sys.stdlib_module_names
_MAX_TEXT = 2000
_MAX_WAITING = 4096


@dataclass(frozen=True, slots=True)
class RefusalSite:
    """A line of source: absolute path or as the frame has it, number, function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRefusal:
    """An error of ours that was raised. site: the line that caught it, if that is not halstack's,
    else the innermost line outside halstack on its way, if it met one. count: how often in
    this process."""

    number: int
    kind: str
    who: str
    required: str
    found: str
    remedy: str
    site: RefusalSite | None
    is_swallowed: bool
    count: int = 1


class RefusalLog:
    """The refusals of a process. Safe in threads, and in the collector's finalizers."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._last = 0
        self._living: deque[weakref.ref[BaseException]] = deque(maxlen=_MAX_WAITING)
        # What finalizers append to: they may run inside the lock's owner, at any line.
        self._dead: deque[RecordedRefusal] = deque(maxlen=_MAX_WAITING)
        self._kept: dict[tuple[object, ...], RecordedRefusal] = {}
        self._num_dropped = 0

    def mark(self) -> int:
        """A point in time, for `since`."""
        return self._last

    def note_made(self, error: BaseException) -> int:
        """An error was made; its number."""
        number = self._last = next(self._numbers)
        self._living.append(weakref.ref(error))
        if len(self._dead) > _MAX_WAITING // 2:
            self._settle()
        return number

    def note_end(self, error: BaseException, number: int) -> None:
        """An error is about to be freed. Takes no lock."""
        if sys.is_finalizing():
            return
        found = _judged(error, number)
        if found is not None:
            self._dead.append(found)

    def refusals(
        self, *, since: int = 0, ending: BaseException | None = None
    ) -> list[RecordedRefusal]:
        """What was raised after `mark()` gave `since`, in order; equal ones as one.

        ending: the error that ends the program just now: it and what it came from were not
        swallowed, wherever they were caught on the way.
        """
        not_swallowed = {id(error) for error in _chain(ending)}
        with self._lock:
            self._settle()
            found = dict(self._kept)
        for reference in list(self._living):
            error = reference()
            number = getattr(error, "refusal_number", None)
            if error is None or number is None:
                continue
            judged = _judged(error, number)
            if judged is not None:
                if id(error) in not_swallowed:
                    judged = replace(judged, is_swallowed=False)
                _merge(found, judged)
        return sorted((r for r in found.values() if r.number > since), key=lambda r: r.number)

    @property
    def num_dropped(self) -> int:
        """How many older ones made room."""
        with self._lock:
            self._settle()
            return self._num_dropped

    def clear(self) -> None:
        """Forgets everything: for a forked child, whose parent reports its own."""
        self._lock = threading.RLock()
        self._living.clear()
        self._dead.clear()
        self._kept.clear()
        self._num_dropped = 0

    def _settle(self) -> None:
        with self._lock:
            while self._dead:
                _merge(self._kept, self._dead.popleft())
                if len(self._kept) > MAX_KEPT:
                    del self._kept[next(iter(self._kept))]
                    self._num_dropped += 1


def _key(refusal: RecordedRefusal) -> tuple[object, ...]:
    return (refusal.kind, refusal.who, refusal.found, refusal.site, refusal.is_swallowed)


def _merge(kept: dict[tuple[object, ...], RecordedRefusal], new: RecordedRefusal) -> None:
    """Adds one as the latest; of equal ones the last number stands, so that `since` sees it."""
    key = _key(new)
    older = kept.pop(key, None)
    if older is not None:
        new = replace(new, count=older.count + new.count, number=max(older.number, new.number))
    kept[key] = new


def _judged(error: BaseException, number: int) -> RecordedRefusal | None:
    """What its traceback says of an error; None of one that was never raised by halstack."""
    steps = [(package, step) for package, step in _steps(error) if package not in _STANDARD]
    if not any(package in OUR_PACKAGES for package, _ in steps):
        return None
    outside = [step for package, step in steps if package not in OUR_PACKAGES]
    is_swallowed = steps[0][0] not in OUR_PACKAGES
    place = (outside[0] if is_swallowed else outside[-1]) if outside else None
    who, required, found, remedy = _texts(error)
    return RecordedRefusal(
        number=number,
        kind=type(error).__name__,
        who=who,
        required=required,
        found=found,
        remedy=remedy,
        site=None if place is None else _site(place),
        is_swallowed=is_swallowed,
    )


def _steps(error: BaseException) -> Iterator[tuple[str, TracebackType]]:
    """(top-level package, step) of its traceback, from the catcher to where it was raised."""
    step = error.__traceback__
    while step is not None:
        names = step.tb_frame.f_globals
        name = names.get("__name__")
        if name == "__main__":  # python -m hal_engine.worker
            name = names.get("__package__") or name
        yield (name.partition(".")[0] if isinstance(name, str) else ""), step
        step = step.tb_next


def _site(step: TracebackType) -> RefusalSite:
    code = step.tb_frame.f_code
    return RefusalSite(code.co_filename, step.tb_lineno or 0, code.co_name)


def _texts(error: BaseException) -> tuple[str, str, str, str]:
    """who, required, found, remedy; an error without them says all of it as `found`."""
    parts = [getattr(error, name, None) for name in ("who", "required", "found", "remedy")]
    if all(isinstance(part, str) for part in parts):
        who, required, found, remedy = (str(part)[:_MAX_TEXT] for part in parts)
        return who, required, found, remedy
    return type(error).__name__, "", str(error)[:_MAX_TEXT], ""


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error, what it was raised from, and what groups hold."""
    found: list[BaseException] = []
    waiting = [] if error is None else [error]
    while waiting:
        step = waiting.pop()
        if any(step is known for known in found):
            continue
        found.append(step)
        waiting += [e for e in (step.__cause__, step.__context__) if e is not None]
        if isinstance(step, BaseExceptionGroup):
            waiting += step.exceptions
    return found


REFUSALS: Final = RefusalLog()
"""The log of this process."""

os.register_at_fork(after_in_child=REFUSALS.clear)
