"""One audit of one process: puts everything on, takes everything off, makes the trace.

Torch is not imported here: observing begins when the program imports it, so that what a program
sets before it does (threads, visible devices) still counts.
"""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from hal.auditing.document import Machine
from hal.auditing.foreign_variables import foreign_variables
from hal.auditing.import_watch import FailedImport, ImportWatch
from hal.auditing.messages import MessageWatch
from hal.auditing.observer_frames import FrameReader
from hal.auditing.refusals import mark_refusals, refusals_since
from hal.auditing.threads import ThreadWatch
from hal.auditing.trace import SwallowedError, Trace
from hal.errors import AuditError

if TYPE_CHECKING:
    from hal.auditing.session_torch import TorchSide

Mode = Literal["full", "light"]

_active: list[Session] = []


def active_session() -> Session | None:
    """The audit that runs in this process."""
    return _active[-1] if _active else None


class Session:
    """Observes this process from `start` to `stop`."""

    def __init__(self, mode: Mode = "full") -> None:
        """mode: see `hal.audit`."""
        self.mode: Mode = mode
        self.frames = FrameReader()
        self.messages = MessageWatch(self.frames)
        self.notes: list[str] = []
        self.is_child = False
        self.on_torch: Callable[[], None] | None = None
        self._threads = ThreadWatch(self._begin_thread, self._end_thread)
        self._imports = ImportWatch(
            {
                "torch": self._torch_arrived,
                "torch._dynamo.eval_frame": self._dynamo_arrived,
                "torch._dynamo": self._compiler_complete,
                "torch._inductor.codecache": self._code_generator_arrived,
            },
            self._import_failed,
        )
        self._failed: list[SwallowedError] = []
        self._unfit_torch = ""
        self._torch: TorchSide | None = None
        self._lock = threading.RLock()
        self._begin_s = 0.0
        self._refusal_mark = 0
        self._undo = ExitStack()

    @property
    def has_torch(self) -> bool:
        """Whether the program has imported torch."""
        return self._torch is not None

    def start(self) -> None:
        """Puts everything on.

        Raises:
            AuditError: another audit runs in this process.
        """
        if _active:
            raise AuditError(
                "hal.audit",
                "one audit at a time in a process",
                "an audit that is still running",
                "end that one first, or leave this one out: the outer audit sees everything",
            )
        _active.append(self)
        self._begin_s = perf_counter()
        self._refusal_mark = mark_refusals()
        with ExitStack() as undo:
            undo.callback(_active.remove, self)
            for watch in (self.messages, self._threads, self._imports):
                watch.install()
                undo.callback(watch.restore)
            if "torch" in sys.modules:
                self._torch_arrived()
            undo.callback(self._detach)
            self._undo = undo.pop_all()

    def stop(self, ending: BaseException | None = None) -> Trace:
        """Takes everything off and returns what was seen.

        ending: the error by which the program is ending; it was not swallowed.
        """
        wall_us = (perf_counter() - self._begin_s) * 1e6
        if self._torch is not None:
            self._torch.observer.is_active = False
        self._undo.close()
        return self.trace(wall_us, ending)

    def trace(self, wall_us: float, ending: BaseException | None = None) -> Trace:
        """What was seen until now."""
        trace = Trace(machine=_machine(), wall_us=wall_us)
        trace.messages += self.messages.messages
        trace.swallowed += self._failed
        if self._torch is not None:
            self._torch.fill(trace)
        trace.refusals += refusals_since(self._refusal_mark, ending=ending)
        trace.variables += foreign_variables()
        trace.swallowed = [error for error in trace.swallowed if not _is_of(error, ending)]
        self._add_notes()
        return trace

    def forget(self) -> None:
        """After a fork: what the parent did is the parent's."""
        self._lock = threading.RLock()
        self._refusal_mark = mark_refusals()
        self._begin_s = perf_counter()
        self.messages.forget()
        self._failed.clear()
        self.notes.clear()
        if self._torch is not None:
            self._torch.forget()

    def _torch_arrived(self) -> None:
        """Torch is there: observe this thread, and every one that begins from now on."""
        try:
            from hal.auditing.session_torch import TorchSide
        except (ImportError, AttributeError) as error:
            # A module of the program's, or a version of torch without what observing needs.
            file = getattr(sys.modules["torch"], "__file__", None)
            self._unfit_torch = f"the module torch at {file} cannot be observed: {error}"
            return
        with self._lock:
            if self._torch is None and self in _active:
                self._torch = TorchSide(self.frames, self.mode)
                self._torch.attach()
                if self.on_torch is not None:
                    self.on_torch()

    def _dynamo_arrived(self) -> None:
        if self._torch is not None:
            self._torch.dynamo_arrived()

    def _compiler_complete(self) -> None:
        if self._torch is not None:
            self._torch.compiler_complete()

    def _code_generator_arrived(self) -> None:
        if self._torch is not None:
            self._torch.code_generator_arrived()

    def _detach(self) -> None:
        if self._torch is not None:
            self._torch.detach()

    def _begin_thread(self) -> bool:
        if self._torch is None:
            return False
        self._torch.observe_thread()
        return True

    def _end_thread(self, is_observed: bool) -> None:
        if is_observed and self._torch is not None:
            self._torch.leave_thread()

    def _import_failed(self, failure: FailedImport) -> None:
        place = self.frames.importer_location(failure.frame)
        if place is None:
            return  # torch or the standard library tried, not the program
        self._failed.append(
            SwallowedError(
                kind=type(failure.error).__name__,
                text=str(failure.error)[:500],
                raised_by=failure.name,
                location=place,
            )
        )

    def _add_notes(self) -> None:
        if self._threads.before:
            names = ", ".join(sorted(self._threads.before)[:10])
            self.notes.append(f"threads that were there before the audit are not observed: {names}")
        if self.messages.num_dropped:
            self.notes.append(f"{self.messages.num_dropped} further messages were not kept")
        if self._unfit_torch:
            self.notes.append(self._unfit_torch)
        elif self._torch is None:
            self.notes.append("the program never imported torch")
        else:
            self.notes += self._torch.notes()


def _is_of(error: SwallowedError, ending: BaseException | None) -> bool:
    """Whether it is the error that ended the program, or what that one came from."""
    seen: list[BaseException] = []
    while ending is not None and ending not in seen and len(seen) < 20:
        if type(ending).__name__ == error.kind and str(ending)[:500] == error.text:
            return True
        seen.append(ending)
        ending = ending.__cause__ or ending.__context__
    return False


def _machine() -> Machine:
    """The processor by its name; devices that torch uses are added by `program_report`."""
    return Machine(label=_processor() or platform.machine() or "unknown processor")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
