"""Runs a program as Python itself would: script, folder or module, with its arguments and path.

`__main__`, `sys.argv`, `sys.path[0]`, tracebacks and exit codes are those of `python PROGRAM`.
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from hal.auditing.observer_frames import BOUNDARY
from hal.auditing.program_checks import ARCHIVE_MAGIC

INTERRUPTED: Final = 130
# Imported before any program begins, by Python itself or by `site`.
_OF_EVERY_PYTHON: Final = frozenset(
    {"__main__", "_collections_abc", "_sitebuiltins", "_weakrefset", "abc", "codecs", "encodings"}
    | {"genericpath", "io", "os", "posixpath", "site", "sitecustomize", "stat", "usercustomize"}
)
_FAILED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. path: script, or folder or archive with `__main__.py`; or else module: as
    `python -m` has it. words: the arguments."""

    path: str = ""
    module: str = ""
    words: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """The command line, short."""
        name = f"-m {self.module}" if self.module else self.path
        text = " ".join((name, *self.words))
        return text if len(text) <= 200 else f"{text[:199]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How it ended. error: what it raised, None for an end without one (or by `sys.exit`)."""

    exit_code: int
    error: BaseException | None = None


def shadowed_modules(program: Program) -> list[str]:
    """Files and packages of the program's folder that `import` will not find, although Python alone
    would: this process has imported a module of that name from elsewhere."""
    folder = os.getcwd() if program.module else os.path.realpath(program.path)
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or "." in name or name in _OF_EVERY_PYTHON:
            continue
        for own in (f"{name}.py", os.path.join(name, "__init__.py")):
            path = os.path.join(folder, own)
            if os.path.isfile(path) and not os.path.samefile(path, file):
                found.append(own)
    return found


def run_as_main(program: Program) -> ProgramEnd:
    """Runs it to its end, its threads and children that are no daemons included."""
    sys.argv = [program.path or "-m", *program.words]
    if program.module:
        sys.path[0] = os.getcwd()
    elif os.path.isfile(program.path):
        sys.path[0] = os.path.dirname(os.path.realpath(program.path))
    else:
        del sys.path[0]  # a folder or an archive puts itself there
    try:
        _RUN(program)
        _join()
    except SystemExit as end:
        _join()
        return ProgramEnd(exit_code=_code_of(end))
    except KeyboardInterrupt as error:
        _show(error)
        return ProgramEnd(exit_code=INTERRUPTED, error=error)
    except BaseException as error:  # noqa: BLE001  # the program's: shown as Python shows it
        _show(error)
        _join()
        return ProgramEnd(exit_code=_FAILED, error=error)
    return ProgramEnd(exit_code=0)


def _run_audited_program(program: Program) -> None:
    """Frames outside of this one are not the program's: `BOUNDARY` is its name."""
    if program.module:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    elif os.path.isfile(program.path) and not _is_archive(program.path):
        _run_script(program.path)
    else:
        runpy.run_path(program.path, run_name="__main__")


_RUN: Final = _run_audited_program


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == ARCHIVE_MAGIC


def _run_script(path: str) -> None:
    """In a module that stays `__main__`: what runs at exit still finds it."""
    path = os.path.abspath(path)  # as Python itself names it in `__file__` and tracebacks
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a .pyc
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(
        __file__=path, __builtins__=__builtins__, __loader__=loader, __cached__=None, __spec__=None
    )
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _join() -> None:
    """What Python does before it exits: waits for threads and children that are no daemons."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon and thread.is_alive():
            thread.join()
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None:
        for child in processes.active_children():
            if not child.daemon:
                child.join()


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return _FAILED


def _show(error: BaseException) -> None:
    """By the program's own hook, if it has one, with the program's frames only."""
    cut = error.__traceback__
    found = _inside(cut)
    error.__traceback__ = cut if found is None else found
    sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001  # a hook that fails: Python shows both errors
        traceback.print_exc()
        traceback.print_exception(error)


def _inside(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_name != BOUNDARY:
        tb = tb.tb_next
    tb = None if tb is None else tb.tb_next
    own = (str(Path(__file__)), runpy.__file__, "<frozen runpy>")
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in own:
        tb = tb.tb_next
    return tb
