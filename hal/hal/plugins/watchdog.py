"""Ends a process in which a plug-in's hook does not come back, and says whose hook it was.

A probe has a process of its own to be killed in; hooks that answer in hal's own process (profiles,
candidates, policy, runtime) cannot be taken back, so a command that waits for one for ever ends.
Only commands are watched: a program that imports `hal` decides by itself how long it waits.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from hal.errors import PluginError, ProbeLimitError
from hal.plugins.listing import PluginEntry
from hal.visible_text import visible_text

if TYPE_CHECKING:
    from hal.candidates import KernelCandidate

# Long enough for a sound plug-in on a machine that is busy twenty times over.
DEFAULT_HOOK_DEADLINE_S = 300.0
# A runtime loads a vendor's libraries, a measurement and a self-test run on the device.
SLOW_HOOKS = frozenset({"hal_create_runtime", "hal_self_test", "hal_measure_device"})
SLOW_FACTOR = 10.0
EXIT_CODE = ProbeLimitError.exit_code
# Code that holds the interpreter's lock lets no other thread speak: then the interpreter itself
# prints where it stands and ends the process.
_LOCK_GRACE_S = 5.0
_POLL_S = 0.2
_IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchedHook:
    """A hook that is being called, and until when (of the monotonic clock) it may take."""

    entry: PluginEntry
    hook: str
    allowed_s: float
    until: float

    def error(self) -> PluginError:
        return ProbeLimitError(
            f"{self.entry}, hook {self.hook}",
            f"an answer within {self.allowed_s:g} s",
            "none",
            f"report it to the authors of {self.entry.distribution}; to wait longer, set "
            "plugins.hook_deadline_s; to go on without it, set "
            f'plugins.disable = ["{self.entry.key}"]',
        )


def end_process(watched: WatchedHook) -> NoReturn:
    """Print the error and end the process without asking anybody."""
    sys.stderr.write(f"error: ProbeLimitError: {visible_text(str(watched.error()))}\n")
    sys.stderr.flush()
    os._exit(EXIT_CODE)


class HookWatchdog:
    """Watches the hooks that are called one inside the other in this process.

    Args:
        deadline_s: what a hook may take; ten times that for SLOW_HOOKS.
        on_expiry: what to do about one that takes longer; called in a thread of its own.
        backstop: where the interpreter writes if that thread is never let in; None for no backstop.
    """

    def __init__(
        self,
        deadline_s: float = DEFAULT_HOOK_DEADLINE_S,
        on_expiry: Callable[[WatchedHook], object] = end_process,
        backstop: TextIO | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._on_expiry = on_expiry
        self._backstop = backstop
        self._watched: list[WatchedHook] = []
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, entry: PluginEntry, hook: str, *, has_backstop: bool = True) -> Iterator[None]:
        """While the block runs, the hook's time runs. has_backstop: False for what is called
        thousands of times."""
        allowed = self._deadline_s * (SLOW_FACTOR if hook in SLOW_HOOKS else 1.0)
        watched = WatchedHook(entry, hook, allowed, time.monotonic() + allowed)
        with self._lock:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hal-hooks", daemon=True)
                self._thread.start()
        self._has_work.set()
        backstop = self._backstop if has_backstop else None
        if backstop is not None:
            _arm(allowed, backstop)
        try:
            yield
        finally:
            with self._lock:
                self._watched.remove(watched)
                outer = self._watched[-1] if self._watched else None
                if outer is None:
                    self._has_work.clear()
            if backstop is not None:
                faulthandler.cancel_dump_traceback_later()
                if outer is not None:  # the time of the hook that called this one goes on
                    _arm(max(0.0, outer.until - time.monotonic()), backstop)

    def _run(self) -> None:
        """Looks now and then, and ends once nothing was watched for a while."""
        reported: set[WatchedHook] = set()
        while self._is_needed():
            now = time.monotonic()
            with self._lock:
                late = [w for w in self._watched if w.until <= now and w not in reported]
            for watched in late:
                reported.add(watched)
                self._on_expiry(watched)
            time.sleep(_POLL_S)

    def _is_needed(self) -> bool:
        if self._has_work.wait(_IDLE_S):
            return True
        with self._lock:
            if not self._watched:
                self._thread = None
            return bool(self._watched)


def _arm(allowed_s: float, backstop: TextIO) -> None:
    faulthandler.dump_traceback_later(allowed_s + _LOCK_GRACE_S, exit=True, file=backstop)


def watched_candidate(
    watchdog: HookWatchdog, entry: PluginEntry, candidate: KernelCandidate
) -> KernelCandidate:
    """The candidate, whose answers about a request come from the plug-in as well. Not `load`, which
    may compile for minutes."""

    def watched(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        hook = f"hal_kernel_candidates, {name} of {candidate.name}"

        def call(*arguments: object) -> object:
            with watchdog.watch(entry, hook, has_backstop=False):
                return answer(*arguments)

        return call

    return replace(
        candidate,
        not_supported_reasons=watched("not_supported_reasons", candidate.not_supported_reasons),
        semantic_notes=watched("semantic_notes", candidate.semantic_notes),
        estimate_us=watched("estimate_us", candidate.estimate_us),
        estimate_source=watched("estimate_source", candidate.estimate_source),
        work=watched("work", candidate.work),
    )
