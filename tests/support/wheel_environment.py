"""A virtual environment with wheels in it, as a user's, without a download.

What the wheels depend on is borrowed from the environment of the tests by links, one an installed
package; only halstack itself is left out, which is there as an editable installation.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUILD_DEADLINE_S = 240


@dataclass(frozen=True, slots=True)
class WheelEnvironment:
    """The environment's folder."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def hal(self) -> Path:
        return self.folder / "bin" / "hal"

    def run(
        self, *command: object, cwd: Path | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """A command there, outside of the checkout, without settings of this environment."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HAL_", "PYTHON")) and name != "VIRTUAL_ENV"
        }
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd or self.folder,
            env=kept | {"COLUMNS": "100"},
            check=False,
        )


def build_wheel(project: Path, folder: Path, build_options: Sequence[str]) -> Path:
    """The wheel of a project, in a new folder below `folder`."""
    target = folder / f"wheel-of-{project.name}"
    pip = [sys.executable, "-m", "pip", "wheel", *build_options, "-w", str(target)]
    subprocess.run([*pip, str(project)], check=True, timeout=BUILD_DEADLINE_S)
    (wheel,) = target.glob("*.whl")
    return wheel


def create_environment(folder: Path, wheels: Sequence[Path]) -> WheelEnvironment:
    """A new virtual environment in `folder` with the wheels installed in it."""
    venv.create(folder, with_pip=False, symlinks=True)
    environment = WheelEnvironment(folder)
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=base))
    borrowed = folder / "borrowed"
    _borrow_packages(borrowed)
    (site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "--quiet"]
    command = [*pip, "--no-deps", "--no-index", "--disable-pip-version-check", *map(str, wheels)]
    subprocess.run(command, check=True, timeout=BUILD_DEADLINE_S)
    return environment


def _borrow_packages(folder: Path) -> None:
    """Links to what is installed here, but halstack and what puts folders on the import path."""
    folder.mkdir()
    halstack = importlib.metadata.distribution("halstack")
    own = {Path(str(file)).parts[0] for file in halstack.files or ()}
    for name in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_paths()[name]).iterdir():
            link = folder / entry.name
            if entry.name in own or entry.suffix == ".pth" or link.is_symlink():
                continue
            link.symlink_to(entry)
