"""Children of an audited program: each observes itself and leaves its trace for the parent.

Pythons that the program starts are reached by PYTHONPATH (`child_startup`), forks by
`os.register_at_fork`. A child writes JSON, whole or not at all, into a private folder when it
exits, by `os._exit` too. The parent says of how many it never heard.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hal.auditing.session import Mode, Session, active_session
from hal.auditing.trace import Trace
from hal.auditing.trace_json import merge_traces, trace_from_json, trace_to_json
from hal.errors import AuditError
from hal.text_files import read_regular_text

FOLDER_VARIABLE: Final = "HALSTACK_AUDIT"
MODE_VARIABLE: Final = "HALSTACK_AUDIT_MODE"
_STARTUP: Final = str(Path(__file__).parent / "child_startup")
_WAIT_S: Final = 2.0
_POLL_S: Final = 0.02
_MAX_TRACE_BYTES: Final = 256 << 20
_MAX_REASONS: Final = 3
_MAX_NOTE: Final = 300
_IS_PID: Final = re.compile(r"[0-9]{1,9}")

_exit_now = os._exit


class ProcessEnd:
    """What happens when this process ends, in whichever way that can be seen."""

    def __init__(self) -> None:
        self.action: Callable[[], object] | None = None
        self.pid = os.getpid()
        self._is_hooked = False

    def hook(self) -> None:
        """`os._exit` and the normal exit."""
        if not self._is_hooked:
            self._is_hooked = True
            os._exit = self._exit
            atexit.register(self.run)

    def unhook(self) -> None:
        """As it was."""
        if self._is_hooked:
            self._is_hooked = False
            self.action = None
            os._exit = _exit_now
            atexit.unregister(self.run)

    def run(self) -> None:
        """The action, once, in the process that set it."""
        action, self.action = self.action, None
        if action is not None and self.pid == os.getpid():
            action()

    def _exit(self, status: int) -> Any:
        try:
            self.run()
        finally:
            _exit_now(status)


_END = ProcessEnd()
_fork_hook: list[bool] = []


def at_process_end(action: Callable[[], object]) -> None:
    """Called once when this process ends while an audit runs, by `os._exit` too."""
    _END.action = action


class Children:
    """The parent's side: where children leave their traces."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._folder = ""
        self._before: dict[str, str | None] = {}

    def open(self) -> None:
        """From here on children observe themselves.

        Raises:
            AuditError: there is no folder for temporary files.
        """
        try:
            self._folder = tempfile.mkdtemp(prefix="halstack-audit-")  # only its owner may read it
        except OSError as error:
            required, remedy = "a folder for temporary files", "set TMPDIR to one that is writable"
            raise AuditError("hal.audit", required, str(error), remedy) from error
        path = os.environ.get("PYTHONPATH")
        self._set(FOLDER_VARIABLE, self._folder)
        self._set(MODE_VARIABLE, self._mode)
        self._set("PYTHONPATH", _STARTUP if not path else os.pathsep.join((_STARTUP, path)))
        watch_forks()
        _END.pid = os.getpid()
        _END.hook()

    def _set(self, name: str, value: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = value

    def close(self) -> None:
        """The environment as it was, where the program has not changed it."""
        for name, before in self._before.items():
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._before.clear()
        _END.unhook()

    def collect(self, trace: Trace) -> list[str]:
        """Adds the traces of all children; notes about those that are missing."""
        notes = []
        missing = self._wait()
        unread = 0
        reasons: list[str] = []
        for file in sorted(Path(self._folder).glob("*.json")):
            try:
                # A program may leave anything here: what is no trace must not cost the report.
                other, extra = trace_from_json(read_regular_text(file, _MAX_TRACE_BYTES))
            except (ValueError, OSError, RecursionError) as error:
                unread += 1
                reasons.append(
                    f"the trace of child process {file.stem} is none: {error}"[:_MAX_NOTE]
                )
                continue
            merge_traces(trace, other)
            notes += [str(note) for note in extra.get("notes", ())]
        if missing:
            notes.append(
                f"{len(missing)} child processes were not heard of (killed, still running, or "
                "their Python has no halstack): what they did is not in the report"
            )
        if unread:
            notes.append(f"{unread} traces of child processes could not be read")
            notes += reasons[:_MAX_REASONS]
        shutil.rmtree(self._folder, ignore_errors=True)
        return list(dict.fromkeys(notes))

    def _wait(self) -> set[str]:
        """Children that began and left no trace, after a moment for those that still run."""
        until = time.monotonic() + _WAIT_S
        while True:
            folder = Path(self._folder)
            begun = {f.stem for f in folder.glob("*.started") if _IS_PID.fullmatch(f.stem)}
            missing = begun - {file.stem for file in folder.glob("*.json")}
            if not any(_is_running(int(name)) for name in missing) or time.monotonic() > until:
                return missing
            time.sleep(_POLL_S)


def watch_forks() -> None:
    """Once per process; does nothing while no audit runs."""
    if not _fork_hook:
        _fork_hook.append(True)
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    session = active_session()
    folder = os.environ.get(FOLDER_VARIABLE)
    if session is None or not folder:
        return
    session.forget()
    session.is_child = True
    _END.pid = os.getpid()
    _END.action = lambda: end_child(session, folder)
    if session.has_torch:
        _mark(folder)
    else:
        session.on_torch = lambda: _mark(folder)


def begin_child() -> None:
    """In a Python that an audited program started, when it has imported torch."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not os.path.isdir(folder) or active_session() is not None:
        return
    session = Session("light" if os.environ.get(MODE_VARIABLE) == "light" else "full")
    session.is_child = True
    session.start()
    watch_forks()
    _END.pid = os.getpid()
    _END.action = lambda: end_child(session, folder)
    _END.hook()
    _mark(folder)


def end_child(session: Session, folder: str) -> None:
    """Leaves the trace of this process. A parent that has gone is not waited for."""
    trace = session.stop(ending=sys.exc_info()[1])
    rank = rank_of_environment(os.environ)
    for op in trace.ops:
        op.rank = op.rank or rank
    for call in trace.functions:
        call.rank = call.rank or rank
    text = trace_to_json(trace, {"notes": [n for n in session.notes if "mode:" not in n]})
    target = Path(folder) / f"{os.getpid()}.json"
    partial = target.with_suffix(".part")
    with contextlib.suppress(FileNotFoundError):
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)


def rank_of_environment(environment: Mapping[str, str]) -> int:
    """The rank that a launcher gave; 0 without one."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return 0


def _mark(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (Path(folder) / f"{os.getpid()}.started").write_text(json.dumps(sys.argv[:1]))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return True
    return not state or state[0] != "Z"
