"""How a child process of ours is ended: its input is closed, then by force; no wait is endless.

Each child leads a session of its own, so what it started is in its group and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

# What a killed process may still take: the kernel frees its memory, and a device's driver what it
# had there. One that is stuck inside the kernel does not end at all.
KILLED_DEADLINE_S = 10.0


def end_child(child: subprocess.Popen[bytes], within_s: float) -> bool:
    """Closes the child's input, kills its group unless it ends in time, closes the pipes.

    child: started with start_new_session. within_s: seconds for it to end by itself; 0 kills it at
    once. Returns whether it has ended; False only for one that outlives SIGKILL by
    KILLED_DEADLINE_S, which is then left to be reaped by `subprocess` itself.
    """
    with contextlib.ExitStack() as closing:
        if child.stdout is not None:
            closing.callback(child.stdout.close)
        if child.stdin is not None:
            with contextlib.suppress(OSError):  # what is unwritten goes nowhere
                child.stdin.close()
        return _has_ended(child, within_s) or _kill(child)


def _has_ended(child: subprocess.Popen[bytes], within_s: float) -> bool:
    if within_s <= 0:
        return child.poll() is not None
    try:
        child.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(child: subprocess.Popen[bytes]) -> bool:
    # Not reaped yet, so its id is still the group's.
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # it leads no group
        child.kill()
    return _has_ended(child, KILLED_DEADLINE_S)
