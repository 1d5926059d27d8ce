"""Commands that are run with a deadline: over in time though they outlive their kill."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest

from hal import processes
from hal.processes import ProcessEnd, run_bounded


def test_a_command_that_outlives_its_kill_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a process does that is stuck inside the kernel."""
    monkeypatch.setattr(processes, "_KILLED_DEADLINE_S", 0.2)
    before = set(psutil.Process().children())
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda *_: None)
        began = time.monotonic()
        outcome = run_bounded(
            [sys.executable, "-c", "import time; time.sleep(100)"], deadline_s=0.3, environment={}
        )
        assert time.monotonic() - began < 6.0
    assert outcome.end is ProcessEnd.DEADLINE
    (left,) = set(psutil.Process().children()) - before
    os.killpg(left.pid, signal.SIGKILL)
    assert not psutil.wait_procs([left], timeout=60)[1]
