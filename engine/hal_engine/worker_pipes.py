"""Lines to and from a worker's process, each within its time; what one says of a failed kernel.

Nothing here waits for ever: a frozen process neither reads what it is sent, nor completes a line
that it began, nor ends.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from hal.errors import KernelBuildError

CLOSED_OUTPUT = "it closed its output and still runs"

_FAILURE_FIELDS = ("who", "required", "found", "remedy")
_CHUNK_BYTES = 1 << 16
# A process that ends closes its pipes a little before its exit code can be had, so it gets at
# least the first time; one that lives on without its output is broken, and gets no more than the
# second however long the answer itself might have taken.
_LEAST_END_S, _MOST_END_S = 1.0, 10.0


@dataclass(slots=True)
class Worker:
    """A process of a rank above 0 with its pipes."""

    rank: int
    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]  # read by its descriptor only: a reader's own buffer would hide bytes
    unread: bytearray = field(default_factory=bytearray)  # of stdout, not yet a line


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
            # A reader that takes a byte now and then is not in time either.
            left_s = end - time.monotonic()
            if left_s <= 0 or not _can_write(descriptor, left_s):
                break
    return len(unsent)


def _can_write(descriptor: int, within_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        return bool(selector.select(timeout=within_s))


def read_answer(worker: Worker, deadline: float, most_bytes: int = 1 << 16) -> dict[str, Any]:
    """One JSON object from the worker; one with "error" for anything else, or for nothing.

    deadline: of time.monotonic. Only to learn how a worker ended that closed its output it may be
    passed, by a second.
    """
    try:
        line = _read_line(worker, deadline, most_bytes)
    except OSError as error:
        return {"error": f"its output cannot be read: {error}"}
    if line is None:
        begun = bytes(worker.unread[:200])
        return {"error": f"no answer in time, but {begun!r}" if begun else "no answer in time"}
    if not line:
        return {"error": _how_it_ended(worker, deadline)}
    try:
        answer = json.loads(line)
    except ValueError:  # no JSON, or cut at `most_bytes`
        answer = None
    return answer if isinstance(answer, dict) else {"error": f"it said {line[:200]!r}"}


def _read_line(worker: Worker, deadline: float, most_bytes: int) -> bytes | None:
    """The next line, or what there is of it at the end of the output or at `most_bytes`.

    b"" at the end of the output. None if the line is not whole at the deadline: its beginning is
    kept, and a later call goes on with it.
    """
    unread, descriptor = worker.unread, worker.stdout.fileno()
    end = unread.find(b"\n") + 1
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not end and len(unread) < most_bytes:
            if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(descriptor, _CHUNK_BYTES)
            if not chunk:
                break
            searched = len(unread)
            unread += chunk
            end = unread.find(b"\n", searched) + 1
    size = min(end or most_bytes, most_bytes)
    line = bytes(unread[:size])
    del unread[:size]
    return line


def _how_it_ended(worker: Worker, deadline: float) -> str:
    within_s = min(max(_LEAST_END_S, deadline - time.monotonic()), _MOST_END_S)
    try:
        return f"it ended with exit code {worker.process.wait(timeout=within_s)}"
    except subprocess.TimeoutExpired:
        return CLOSED_OUTPUT


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
