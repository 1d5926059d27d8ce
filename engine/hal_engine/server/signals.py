"""What SIGTERM and SIGINT mean, from the start of serving until the process ends.

The first one drains. A further one aborts: what runs is cut short, and the process ends with 128 +
the signal's number within `abort_deadline_s`, whether it comes while requests run, while the drain
lasts or while the engine closes, and however stuck the engine or the event loop may be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ShutdownSignals:
    """The signals that came so far. `is_over`: serving has ended, so there is nothing to drain."""

    def __init__(self, abort_deadline_s: float) -> None:
        self._abort_deadline_s = abort_deadline_s
        self.has_come = False
        self.is_over = False
        self.abort_signal: int | None = None
        self.on_abort: Callable[[], None] = lambda: None

    @property
    def exit_status(self) -> int:
        """0 after a drain, 128 + signal after an abort."""
        return 0 if self.abort_signal is None else 128 + self.abort_signal

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handles the signals inside; outside of the main thread nobody can.

        Once one has come the process is to end, and the handlers stay until it does: the default
        ones would end it with another status.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle) for number in _SIGNALS}
        try:
            yield
        finally:
            self.is_over = True
            if not self.has_come:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The handler. Says what a signal does that cuts something short."""
        is_first = not self.has_come
        self.has_come = True
        if (is_first and not self.is_over) or self.abort_signal is not None:
            return
        self.abort_signal = number
        # Not by the logger: a handler may interrupt it while it writes.
        os.write(
            2,
            f"{signal.Signals(number).name}: aborting; the process ends with status "
            f"{self.exit_status} within {self._abort_deadline_s:g} s\n".encode(),
        )
        end_process_within(self._abort_deadline_s, self.exit_status)
        self.on_abort()


def end_process_within(seconds: float, status: int) -> threading.Timer:
    """Ends the process hard when the time is over; cancel the result to keep it."""
    timer = threading.Timer(seconds, os._exit, [status])
    timer.daemon = True
    timer.start()
    return timer


def ignore_signals() -> None:
    """For a process that has served and only has to end: its exit status is decided."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
