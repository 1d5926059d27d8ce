"""Lines to and from a worker's process, each within its time; what one says of a failed kernel.

Nothing here waits for ever: a frozen process neither reads what it is sent nor ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from hal.errors import KernelBuildError

_FAILURE_FIELDS = ("who", "required", "found", "remedy")


@dataclass(slots=True)
class Worker:
    """A process of a rank above 0 with its pipes."""

    rank: int
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]


def write_in_time(descriptor: int, data: bytes, deadline_s: float) -> int:
    """Writes `data` to a pipe that does not block; returns how many bytes are left at the deadline.

    Raises OSError if the other end is closed.
    """
    unsent = memoryview(data)
    end = time.monotonic() + deadline_s
    while unsent:
        try:
            unsent = unsent[os.write(descriptor, unsent) :]
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_WRITE)
                if not selector.select(timeout=max(0.0, end - time.monotonic())):
                    break
    return len(unsent)


def read_answer(worker: Worker, deadline: float, most_bytes: int = 1 << 16) -> dict[str, Any]:
    """One JSON object from the worker; one with "error" for anything else, or for nothing.

    deadline: of time.monotonic.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
            return {"error": "no answer in time"}
    line = worker.stdout.readline(most_bytes)
    if not line:
        return {"error": f"it ended with exit code {worker.process.wait(timeout=10)}"}
    try:
        answer = json.loads(line)
    except ValueError:  # no JSON, or cut at `most_bytes`
        answer = None
    return answer if isinstance(answer, dict) else {"error": f"it said {line[:200]!r}"}


def failure_answer(error: KernelBuildError) -> dict[str, Any]:
    """What a worker answers that cannot compile a kernel."""
    said = {name: getattr(error, name) for name in _FAILURE_FIELDS}
    return {"state": "failed", "error": f"{type(error).__name__}: {error}", "build_failure": said}


def failure_in(answer: Mapping[str, Any], rank: int) -> KernelBuildError | None:
    """The same on rank 0, with the rank's name; None for any other answer."""
    said = answer.get("build_failure")
    if not isinstance(said, dict):
        return None
    who, required, found, remedy = (str(said.get(name, "")) for name in _FAILURE_FIELDS)
    return KernelBuildError(f"{who} on rank {rank}", required, found, remedy)
