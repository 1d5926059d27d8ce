"""The one thread that runs torch's parallel code: it loads the model, then becomes the engine's.

OpenMP keeps a team of workers for every thread that ever started parallel work. libgomp lets idle
workers spin only while the process has no more of them than processors; with a second team it puts
them to sleep after each region, and every kernel launch then pays for waking them (measured: a
decode step 15 to 20% slower). So the weights are packed on the thread that will run the steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Result = TypeVar("_Result")


class ComputeThread:
    """A thread that runs what it is given, until it is told what to do for the rest of its life."""

    def __init__(self, name: str = "hal-engine") -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Runs `work` on the thread and waits for it; raises what it raises."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  # handed to the caller, who waits
                future.set_exception(error)

        self._work.put((run, False))
        return future.result()

    def become(self, work: Callable[[], None]) -> threading.Thread:
        """Lets the thread run `work` and end with it. Returns the thread, to be joined."""
        self._work.put((work, True))
        return self._thread

    def end(self) -> None:
        """Ends a thread that is not to become anything."""
        self.become(lambda: None)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            work, is_last = self._work.get()
            work()
