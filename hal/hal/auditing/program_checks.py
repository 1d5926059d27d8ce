"""Whether there is a program to audit: what Python would refuse to run is refused before anything
is put on, and without a traceback. Nothing of the program is imported for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from hal.errors import UsageError

if TYPE_CHECKING:
    from hal.auditing.program_runs import Program

ARCHIVE_MAGIC: Final = b"PK\x03\x04"
_LOOKED_AT: Final = 1 << 16
_REMEDY: Final = (
    "correct the path; options of `hal audit run` come before it, the program's after it"
)


def check_program(program: Program) -> None:
    """Refuses what cannot be run.

    Raises:
        UsageError: no such file or module; a folder, archive or package without `__main__`; a file
            that is no text and no compiled Python; one that may not be read.
    """
    if program.module:
        _check_module(program.module)
    else:
        _check_path(program.path)


def _refuse(required: str, found: str, remedy: str = _REMEDY) -> NoReturn:
    raise UsageError("hal audit run", required, found, remedy)


def _check_path(path: str) -> None:
    if not os.path.exists(path):
        _refuse("a script, or -m and a module", f"no file {path!r}")
    if os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, f"__main__.{end}")) for end in ("py", "pyc")):
            _refuse(
                "a script, or a folder with a __main__.py",
                f"the folder {path!r} without one",
                "name a script in it, or -m and its package",
            )
        return
    if not os.path.isfile(path):
        return  # a pipe or a device: what is in it is known when it is read
    try:
        with open(path, "rb") as file:
            beginning = file.read(_LOOKED_AT)
    except OSError as error:
        _refuse("a file that can be read", f"{path!r}: {error.strerror or error}")
    if beginning.startswith(ARCHIVE_MAGIC):
        _check_archive(path)
    elif b"\0" in beginning and not beginning.startswith(importlib.util.MAGIC_NUMBER):
        _refuse(
            "a script in Python",
            f"{path!r}, which is no text",
            "name the Python program; of a command on PATH its module, with -m",
        )


def _check_archive(path: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
    except (zipfile.BadZipFile, OSError) as error:
        _refuse("an archive that can be read", f"{path!r}: {error}")
    if not {"__main__.py", "__main__.pyc"} & names:
        _refuse("an archive with a __main__.py", f"{path!r} without one")


def _check_module(name: str) -> None:
    remedy = "correct the name; -m takes a module's name without .py, found from this folder on"
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        _refuse("-m and the name of a module", repr(name), remedy)
    spec: ModuleSpec | None = None
    for count in range(1, len(parts) + 1):
        known, whole = spec, ".".join(parts[:count])
        path = None if known is None else list(known.submodule_search_locations or ())
        spec = _find(whole, path)
        if spec is None and known is not None and _makes_its_path(known):
            return  # Python may find it where the package says
        if spec is None:
            _refuse("-m and a module that is there", f"no module {whole!r}", remedy)
    if spec is None or spec.submodule_search_locations is None:
        return
    main = _find(f"{name}.__main__", list(spec.submodule_search_locations))
    if main is None and not _makes_its_path(spec):
        _refuse(
            "a module, or a package with a __main__.py",
            f"the package {name!r} without one",
            "name a module in it",
        )


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """As an import would, without importing what it is in. path: of its package, None outside."""
    here = None if path is not None else PathFinder.find_spec(name, [os.getcwd()])
    if here is not None:
        return here
    for finder in sys.meta_path:
        found: ModuleSpec | None = finder.find_spec(name, path)
        if found is not None:
            return found
    return None


def _makes_its_path(spec: ModuleSpec) -> bool:
    """Whether a package says by itself where its modules are."""
    if not spec.origin or not spec.origin.endswith(".py"):
        return spec.origin is not None
    try:
        return "__path__" in Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
