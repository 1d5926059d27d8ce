"""The generator of the documents, importable, and the environment of a reader."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from document_blocks import ROOT


@pytest.fixture(scope="session")
def generator() -> Iterator[dict[str, ModuleType]]:
    """The modules of docs/ by name."""
    folder = str(ROOT / "docs")
    names = ("sources", "support", "tables", "generate")
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="session")
def command_environment() -> dict[str, str]:
    """What a reader has: the environment's commands first on the path, 100 columns, no HAL_*, and
    nothing of the tests' own (tests/conftest.py)."""
    ours = ("HAL_", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return kept | {"PATH": path, "COLUMNS": "100", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def fresh_environment(
    command_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The same on a machine where nothing was measured (and no kernel compiled) yet."""
    return command_environment | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
