"""Run a function in a forked child process: what `processes` is for commands, without the cost of
a new interpreter.

For single-threaded processes only: another thread might hold a lock that the child would then wait
for without end.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hal.processes import BoundedPipe, ProcessEnd, ProcessOutcome, watch_child

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_DEADLINE_S = 5.0
_POLL_S = 0.001


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of whatever this process's descendants leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(slots=True)
class ForkedChild:
    """A child process made by fork."""

    pid: int
    exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code


def run_forked(
    work: Callable[[int], None],
    *,
    deadline_s: float,
    output_limit_bytes: int,
    result_limit_bytes: int,
) -> ProcessOutcome:
    """Run `work` in a child of its own session, to its end, deadline or output limit.

    Afterwards no process that came from the child is left, in whatever session: this process must
    have called `adopt_orphans`, and have no other children.

    Args:
        work: gets the file descriptor to write the result to; the process ends when it returns,
            with exit code 0, or 1 if it raised.
        deadline_s: seconds after which the child is killed.
        output_limit_bytes: the most bytes of stdout, and of stderr.
        result_limit_bytes: the most bytes of the result.

    Raises:
        OSError: no process or pipe can be made.
    """
    started = time.monotonic()
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in the child would copy every page of the parent's objects
    pid = os.fork()
    if pid == 0:
        _run_child(work, parent, writers)
    with contextlib.ExitStack() as stack:
        for descriptor in readers:
            stack.callback(os.close, descriptor)
        for descriptor in writers:
            os.close(descriptor)
        child = ForkedChild(pid)
        limits = (output_limit_bytes, output_limit_bytes, result_limit_bytes)
        pipes = [BoundedPipe(*pair) for pair in zip(readers, limits, strict=True)]
        end = watch_child(child, pipes, started + deadline_s)
        exit_code = child.poll()
        end_descendants()
    return ProcessOutcome(
        end=end,
        exit_code=exit_code if end is ProcessEnd.EXITED else None,
        stdout=bytes(pipes[0].kept),
        stderr=bytes(pipes[1].kept),
        result=bytes(pipes[2].kept),
        elapsed_s=time.monotonic() - started,
    )


def _run_child(work: Callable[[int], None], parent: int, writers: tuple[int, ...]) -> NoReturn:
    try:
        os.setsid()
        end_with_parent(parent)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(writers[0], 1)
        os.dup2(writers[1], 2)
        result = os.dup(writers[2])
        # Pipes of other children, and the parent's way to its own parent, are not for this one.
        os.closerange(3, result)
        os.closerange(result + 1, os.sysconf("SC_OPEN_MAX"))
        work(result)
    except BaseException:  # noqa: BLE001 - whatever it is, this process must not go on as its parent
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: threads and exit handlers get no say in how this ends.
    os._exit(0)


def end_descendants() -> None:
    """Kill and reap every descendant of this process, which adopts orphans.

    Raises:
        TimeoutError: some are left after 5 s.
    """
    deadline = time.monotonic() + _END_DEADLINE_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"descendants of process {os.getpid()} cannot be killed")
        for child in _children():
            # Killed one by one: what a killed one leaves behind becomes our child.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """The direct children of this process."""
    me = str(os.getpid())
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # A process may end while it is looked at.
            with contextlib.suppress(OSError, IndexError):
                state = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
                if state[1] == me:
                    found.append(int(folder.name))
    return found
