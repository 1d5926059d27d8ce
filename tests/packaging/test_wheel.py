"""The wheel holds the five packages whole, and nothing else."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from document_blocks import ROOT
from wheel_environment import create_environment

CHECK = Path(__file__).parent / "check_installed_wheel.py"
FOLDERS = {
    "hal": "hal",
    "backends": "hal_backends",
    "engine": "hal_engine",
    "kernels": "hal_kernels",
    "capability_db": "hal_capability_db",
}


@pytest.fixture(scope="module")
def wheel(
    tmp_path_factory: pytest.TempPathFactory, build_options: list[str]
) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", *build_options, "-w", str(folder)]
    subprocess.run([*pip, str(ROOT)], check=True, timeout=240)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _files_of(folder: str) -> set[str]:
    base = ROOT / folder
    return {
        path.relative_to(base).as_posix()
        for path in base.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_holds_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """Data files and py.typed included: an editable install would not notice a missing one."""
    held = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    wanted = set().union(*(_files_of(folder) for folder in FOLDERS))
    assert {name.split("/")[0] for name in held} == set(FOLDERS.values())
    assert held == wanted
    assert {f"{package}/py.typed" for package in FOLDERS.values()} <= held


def test_metadata(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (info,) = {n.split("/")[0] for n in wheel.namelist() if n.split("/")[0].endswith(".dist-info")}
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode("utf-8"))
    assert metadata["Name"] == "halstack"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == project["requires-python"]
    plain = {r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    assert plain == set(project["dependencies"])
    assert wheel.read(f"{info}/licenses/LICENSE") == Path(ROOT / "LICENSE").read_bytes()
    points = configparser.ConfigParser()
    points.read_string(wheel.read(f"{info}/entry_points.txt").decode("utf-8"))
    assert dict(points["hal.backends"]) == project["entry-points"]["hal.backends"]
    assert dict(points["console_scripts"]) == project["scripts"]


def test_the_check_of_an_installed_wheel_knows_every_entry_point() -> None:
    """`tox -e wheel` runs it with nothing of the checkout; here at least its list is current."""
    check = runpy.run_path(str(CHECK))
    check["check_entry_points"](importlib.metadata.distribution("halstack"))
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert "python -I {tox_root}{/}tests{/}packaging{/}check_installed_wheel.py" in tox


@pytest.mark.long
def test_the_installed_wheel_is_complete(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    environment = create_environment(tmp_path / "environment", [Path(str(wheel.filename))])
    done = environment.run(environment.python, "-I", CHECK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("^the installed wheel is complete$", done.stdout, re.MULTILINE)
