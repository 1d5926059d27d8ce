"""Run by every Python that an audited program starts: its folder is first on PYTHONPATH then.

Imports nothing but the standard library. When the child imports torch, its own audit begins; a
child that never does pays a finder on `sys.meta_path`. The environment's own `sitecustomize`, if
there is one, runs as it would have.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_next_one() -> None:
    """As if this folder were not on the path."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.getcwd()) != _HERE]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


class _WaitForTorch(importlib.abc.MetaPathFinder):
    """Begins the audit once torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Torch's own spec with a loader that tells."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        else:
            sys.meta_path.insert(0, self)
        return spec


class _Telling(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_halstack_there() -> bool:
    """Whether `hal` means halstack here, and not a module of the program's with that name, which
    is not for us to run."""
    try:
        spec = importlib.util.find_spec("hal")
    except ValueError:  # a module without a spec
        return False
    folder = os.path.dirname((spec and spec.origin) or "")
    return os.path.isfile(os.path.join(folder, "auditing", "children.py"))


def _begin() -> None:
    if not _is_halstack_there():
        _leave_mark()
        return
    try:
        from hal.auditing.children import begin_child
    except ImportError:
        # Another environment's Python: the parent says that it heard nothing of this process.
        _leave_mark()
        return
    begin_child()


def _leave_mark() -> None:
    folder = os.environ.get("HALSTACK_AUDIT", "")
    if os.path.isdir(folder):
        with open(os.path.join(folder, f"{os.getpid()}.started"), "w", encoding="utf-8"):
            pass


if os.environ.get("HALSTACK_AUDIT"):
    import importlib.util

    sys.meta_path.insert(0, _WaitForTorch())
_run_the_next_one()  # last: it may fail, and may import torch itself
