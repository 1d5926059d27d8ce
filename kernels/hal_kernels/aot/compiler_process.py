"""Runs a compiler of kernels in a process of its own, and tells its refusals from the machine's.

What a compiler refuses, or dies of by itself, says something about the kernel and is evidence.
What the machine failed at (no room, no permission, no time, a killed process) says nothing about
it, and stored as evidence it would take the kernel away from a device that can run it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hal.errors import KernelCompilerError, KernelSourceError
from hal.processes import ProcessEnd, ProcessOutcome, run_bounded

MACHINE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not the kernel's fault, worth another try
_TRACEBACK = "Traceback (most recent call last)"
_SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_NO_MEMORY = re.compile(r"bad_alloc|out of memory|cannot allocate memory", re.IGNORECASE)
# An assembler that was killed: Triton words its exit code and nothing else.
_TOOL_KILLED = re.compile(r"failed with error code -(9|15|2|1)\b")
_MAX_ERROR = 300


class MachineFailureError(Exception):
    """In the compiling process: the machine, not the compiler, is why there is no machine code."""


@dataclass(frozen=True, slots=True)
class CompilerRun:
    """lines: what came through the result channel. refusal: what the compiler died of, "" if it
    ended well. is_late: the deadline ended it."""

    lines: tuple[str, ...]
    refusal: str = ""
    is_late: bool = False


def machine_failure(error: BaseException) -> str:
    """What the machine failed at; "" for a compiler's own refusal."""
    cause: BaseException | None = error
    while cause is not None:
        text = f"{type(cause).__name__}: {cause}"
        is_of_machine = isinstance(cause, OSError | MemoryError | subprocess.SubprocessError)
        if is_of_machine or _TOOL_KILLED.search(text) or _NO_MEMORY.search(text):
            return text[:_MAX_ERROR]
        cause = cause.__cause__
    return ""


def leave_for_machine_failure(failure: MachineFailureError) -> None:
    """Ends the compiling process so that the one that asked knows why."""
    sys.stderr.write(f"{failure}\n")
    sys.exit(MACHINE_EXIT_CODE)


def run_compiler(
    module: str, arguments: Sequence[str], *, what: str, deadline_s: float
) -> CompilerRun:
    """`python -m module *arguments FD`, a line of the result channel per variant.

    what: the kernel and its target, for messages. Raises KernelSourceError for an exception of
    our own sources, KernelCompilerError where the machine failed.
    """
    outcome = run_bounded(
        [sys.executable, "-m", module, *arguments, "{result_fd}"],
        deadline_s=deadline_s,
        # The interpreter's flag would compile nothing; the rounding of products is stated.
        environment={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "TRITON_DEFAULT_FP_FUSION": "1",
        },
        result_limit_bytes=1 << 20,
        is_contained=True,
    )
    lines = tuple(line.decode() for line in outcome.result.splitlines())
    if outcome.end is ProcessEnd.EXITED and outcome.exit_code == 0:
        return CompilerRun(lines)
    if outcome.end is ProcessEnd.DEADLINE:
        return CompilerRun(lines, is_late=True)
    stderr = outcome.stderr.decode(errors="replace").strip()
    tail = "".join(stderr.splitlines()[-1:])[:_MAX_ERROR]
    _refuse_if_not_the_compiler(outcome, what, stderr, tail)
    return CompilerRun(lines, f"the compiler ended: {outcome.describe()} {tail}".strip()[:300])


def _refuse_if_not_the_compiler(outcome: ProcessOutcome, what: str, stderr: str, tail: str) -> None:
    code = outcome.exit_code or 0
    has_exited = outcome.end is ProcessEnd.EXITED
    if (
        not has_exited
        or code == MACHINE_EXIT_CODE
        or -code in _SENT_FROM_OUTSIDE
        or (code < 0 and _NO_MEMORY.search(stderr))
    ):
        found = tail if code == MACHINE_EXIT_CODE else f"{outcome.describe()} {tail}".strip()
        raise compiler_error(what, found)
    # A compiler's refusal is evidence and came as a result; an exception of ours is of the sources,
    # and stored as evidence it would look like a target that takes no such kernel.
    if code > 0 and _TRACEBACK in stderr:
        raise KernelSourceError(
            f"compiling {what}",
            "kernels and their declarations that can be imported and read",
            tail,
            "correct the error; nothing was stored of this kernel",
        )


def compiler_error(what: str, found: str) -> KernelCompilerError:
    """The machine failed while compiling `what`."""
    return KernelCompilerError(
        f"compiling {what}",
        "a compiler that runs to its end here",
        found,
        "give it memory, time and a folder that can be written (TRITON_CACHE_DIR), and try again; "
        "nothing was stored of this kernel",
    )
