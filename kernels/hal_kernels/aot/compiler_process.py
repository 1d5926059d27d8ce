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
# What a compiler that meets an unfit kernel dies of by itself; any other signal came from outside.
_OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
_NO_ROOM = re.compile(
    r"bad_alloc|out of memory|cannot allocate|no space left|input/output error|file too large"
    r"|(?:could not|cannot|failed to|unable to) (?:open|write|read|create)|too many open files"
    r"|read-only file system|permission denied|quota exceeded",
    re.IGNORECASE,
)
# Triton's front end, by the module of its errors, and what its passes and assemblers end with.
_COMPILER_MODULES = ("triton.compiler.errors", "triton.runtime.errors")
_OWN_ENDS = re.compile(
    r"PassManager::run failed|failed to translate|LLVM ERROR|Internal Triton PTX codegen error"
    r"|`ptxas` raised SIGSEGV",
    re.IGNORECASE,
)
_ASSEMBLER = re.compile(r"`ptxas` (?:failed with error code|raised)|Internal Triton PTX codegen")
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
    """What the machine failed at; "" for a compiler's own refusal.

    A refusal is what Triton's front end, its passes and its assembler say of a kernel. Whatever
    else comes out of a compilation is not known to be one, and is not taken for it.
    """
    cause: BaseException | None = error
    last = error
    while cause is not None:
        last = cause
        text = f"{type(cause).__name__}: {cause}"
        if isinstance(cause, OSError | MemoryError | subprocess.SubprocessError):
            return text[:_MAX_ERROR]
        if _NO_ROOM.search(text):
            return _telling_line(text)
        cause = cause.__cause__
    return "" if _is_refusal(error, last) else _telling_line(f"{type(last).__name__}: {last}")


def _is_refusal(error: BaseException, innermost: BaseException) -> bool:
    texts = f"{error}\n{innermost}"
    if _ASSEMBLER.search(texts):
        # Of an assembler only the exit code that it has for bad code, and a crash of its own.
        return bool(_OWN_ENDS.search(texts))
    modules = {type(one).__module__ for one in (error, innermost)}
    return bool(modules & set(_COMPILER_MODULES) or _OWN_ENDS.search(texts))


def _telling_line(text: str) -> str:
    """Of many lines the one that says what failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _NO_ROOM.search(line)] or lines
    return (telling or [""])[0][:_MAX_ERROR]


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
        or (code < 0 and (-code not in _OWN_SIGNALS or _NO_ROOM.search(stderr)))
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
