"""Run one child process under a deadline, with bounded output, killed as a group.

The child gets its own session, so that whatever it starts dies with it, and an optional
result channel: a pipe of its own that nothing printed by the child can be mistaken for.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

_POLL_S = 0.02
# After the child has exited, what it wrote is already in the pipe; only a grandchild that
# keeps the pipe open could make us wait longer, and that one is about to be killed.
_CHUNK_BYTES = 65536
_MARK_VARIABLE = "HALSTACK_CHILD"
_KILLED_DEADLINE_S = 10.0


class ProcessEnd(StrEnum):
    """Why a child process is over."""

    EXITED = "exited"
    DEADLINE = "deadline"
    OUTPUT_LIMIT = "output limit"
    LOST = "lost"
    """Nobody saw its end: the process that watched over it was killed or stopped."""


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """What a child process did. `exit_code` is negative for a signal, None if we killed it."""

    end: ProcessEnd
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    result: bytes
    elapsed_s: float

    def describe(self) -> str:
        """How it ended, in words."""
        if self.end is ProcessEnd.DEADLINE:
            return f"no end after {self.elapsed_s:.1f} s, killed"
        if self.end is ProcessEnd.OUTPUT_LIMIT:
            return f"more output than allowed after {self.elapsed_s:.1f} s, killed"
        if self.end is ProcessEnd.LOST:
            return "the process that watched over it was killed or stopped"
        if self.exit_code is not None and self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}"


def signal_name(number: int) -> str:
    """`SIGSEGV` for 11; `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Child(Protocol):
    """A child process that was started and may have ended."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...


class BoundedPipe:
    """The reading end of one pipe and the bytes kept from it."""

    def __init__(self, descriptor: int, limit_bytes: int) -> None:
        self.descriptor = descriptor
        self.limit_bytes = limit_bytes
        self.kept = bytearray()
        self.is_over_limit = False
        os.set_blocking(descriptor, False)

    def read_available(self) -> bool:
        """Take what is there now. False once the other end is closed."""
        while True:
            try:
                chunk = os.read(self.descriptor, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            room = self.limit_bytes - len(self.kept)
            self.kept += chunk[:room]
            if len(chunk) > room:
                self.is_over_limit = True
                return True


def run_bounded(
    argv: Sequence[str],
    *,
    deadline_s: float,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    output_limit_bytes: int = 1 << 20,
    result_limit_bytes: int | None = None,
    is_contained: bool = False,
) -> ProcessOutcome:
    """Run `argv` to its end, its deadline or its output limit, whichever is first.

    Args:
        argv: the command; with a result channel, `{result_fd}` in an argument is replaced by
            the number of the file descriptor to write the result to.
        deadline_s: seconds after which the whole process group is killed.
        environment: the child's complete environment.
        stdin: bytes the child can read from its standard input (at most a few megabytes;
            kept in an unnamed file, so a child that does not read cannot block us).
        output_limit_bytes: the most bytes of stdout, and of stderr; one more and the group is
            killed.
        result_limit_bytes: the most bytes of the result channel; None for no channel.
        is_contained: also kill what left the group (by setsid), found by a mark in its
            environment.

    Raises:
        OSError: the command cannot be started.
    """
    started = time.monotonic()
    mark = uuid.uuid4().hex if is_contained else ""
    if mark:
        environment = {**environment, _MARK_VARIABLE: mark}
    with contextlib.ExitStack() as stack:
        pass_fds: list[int] = []
        result_read: int | None = None
        if result_limit_bytes is not None:
            result_read, result_write = os.pipe()
            stack.callback(os.close, result_read)
            pass_fds.append(result_write)
            argv = [part.replace("{result_fd}", str(result_write)) for part in argv]
        try:
            child = _start(argv, environment, stdin, pass_fds, stack)
        finally:
            for descriptor in pass_fds:
                os.close(descriptor)
        if mark:
            stack.callback(_end_marked, mark)
        stack.callback(_end_group, child)
        pipes = _pipes(child, output_limit_bytes, result_read, result_limit_bytes)
        end = watch_child(child, pipes, started + deadline_s)
        exit_code = child.poll()
        _end_group(child)
        return ProcessOutcome(
            end=end,
            exit_code=exit_code if end is ProcessEnd.EXITED else None,
            stdout=bytes(pipes[0].kept),
            stderr=bytes(pipes[1].kept),
            result=bytes(pipes[2].kept) if len(pipes) > 2 else b"",
            elapsed_s=time.monotonic() - started,
        )


def _start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    stdin: bytes,
    pass_fds: Sequence[int],
    stack: contextlib.ExitStack,
) -> subprocess.Popen[bytes]:
    source: int = subprocess.DEVNULL
    if stdin:
        source = os.memfd_create("hal-stdin", os.MFD_CLOEXEC)
        stack.callback(os.close, source)
        remaining = memoryview(stdin)
        while remaining:
            remaining = remaining[os.write(source, remaining) :]
        os.lseek(source, 0, os.SEEK_SET)
    child = subprocess.Popen(
        list(argv),
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        pass_fds=tuple(pass_fds),
        start_new_session=True,
        bufsize=0,
    )
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stack.callback(stream.close)
    return child


def _pipes(
    child: subprocess.Popen[bytes],
    output_limit_bytes: int,
    result_read: int | None,
    result_limit_bytes: int | None,
) -> list[BoundedPipe]:
    pipes = [
        BoundedPipe(stream.fileno(), output_limit_bytes)
        for stream in (child.stdout, child.stderr)
        if stream is not None
    ]
    if result_read is not None and result_limit_bytes is not None:
        pipes.append(BoundedPipe(result_read, result_limit_bytes))
    return pipes


def watch_child(child: Child, pipes: Sequence[BoundedPipe], deadline: float) -> ProcessEnd:
    """Read from the pipes until the child ends, `deadline` (of the monotonic clock) passes, or a
    pipe brings more than its limit. Kills nothing."""
    with selectors.DefaultSelector() as selector, _process_descriptor(child) as exit_descriptor:
        for pipe in pipes:
            selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        if exit_descriptor is not None:
            selector.register(exit_descriptor, selectors.EVENT_READ)
        while True:
            has_exited = child.poll() is not None
            if not has_exited and time.monotonic() >= deadline:
                return ProcessEnd.DEADLINE
            if selector.get_map():
                ready = selector.select(0 if has_exited else _POLL_S)
            else:
                ready = []
                time.sleep(0 if has_exited else _POLL_S)
            for key, _ in ready:
                if key.fd == exit_descriptor:
                    continue
                source: BoundedPipe = key.data
                if not source.read_available():
                    selector.unregister(source.descriptor)
                if source.is_over_limit:
                    return ProcessEnd.OUTPUT_LIMIT
            if has_exited:
                return ProcessEnd.EXITED


@contextlib.contextmanager
def _process_descriptor(child: Child) -> Iterator[int | None]:
    """A file descriptor that can be waited on for the child's end; None where kernels before 5.3
    or a sandbox have none, and looking now and then has to do."""
    try:
        descriptor = os.pidfd_open(child.pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group and reap the child."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # start_new_session made the child the leader: its id is the group's, and a group id
        # is not reused while a member lives.
        os.killpg(child.pid, signal.SIGKILL)
    # One that is stuck inside the kernel does not end; `subprocess` reaps it when it does.
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_KILLED_DEADLINE_S)


def _end_marked(mark: str) -> None:
    """Kill the processes of this user that carry the mark in their environment."""
    wanted = f"{_MARK_VARIABLE}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        # A process may end, or belong to somebody else: then it is not ours to kill.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
