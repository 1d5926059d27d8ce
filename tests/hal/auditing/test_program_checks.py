"""Programs that cannot be run: a clear error each, before anything runs or is imported."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hal.auditing.program_checks import check_program
from hal.auditing.program_runs import Program
from hal.errors import UsageError
from hal_process import run_hal


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "bare").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "__main__.py").write_text("print('ran')")
    for name, text in (("package", "raise RuntimeError('imported')"), ("runs", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "part.py").write_text("print('ran')")
    (tmp_path / "runs" / "__main__.py").write_text("print('ran')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "__init__.py").write_text("__path__ = ['runs']")
    (tmp_path / "binary").write_bytes(b"\x7fELF\0" + random.randbytes(200))
    with zipfile.ZipFile(tmp_path / "empty.zip", "w") as archive:
        archive.writestr("other.py", "")
    with zipfile.ZipFile(tmp_path / "runs.zip", "w") as archive:
        archive.writestr("__main__.py", "print('ran')")
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04" + random.randbytes(40))
    py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "script.pyc"))
    return tmp_path


REFUSED = {
    "nowhere.py": "no file 'nowhere.py'",
    "bare": "the folder 'bare' without one",
    ".": "the folder '.' without one",
    "binary": "'binary', which is no text",
    sys.executable: "which is no text",
    "empty.zip": "'empty.zip' without one",
    "broken.zip": "an archive that can be read",
}
REFUSED_MODULES = {
    "nowhere": "no module 'nowhere'",
    "script.py": "no module 'script.py'",
    "bare.part": "no module 'bare.part'",
    "package": "the package 'package' without one",
    "package.nowhere": "no module 'package.nowhere'",
    "nowhere.at.all": "no module 'nowhere'",
    "no name": "'no name'",
    "": "a script, or -m",
}


@pytest.mark.parametrize("path", REFUSED)
def test_paths_that_are_no_program(path: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_program(Program(path=path))
    assert REFUSED[path] in str(raised.value)
    assert "hal audit run" in str(raised.value)


@pytest.mark.parametrize("module", REFUSED_MODULES)
def test_modules_that_are_no_program(module: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_program(Program(module=module))
    assert REFUSED_MODULES[module] in str(raised.value)
    assert module not in sys.modules


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder: Path) -> None:
    (folder / "script.py").chmod(0)
    with pytest.raises(UsageError, match="can be read"):
        check_program(Program(path="script.py"))


RUN = (
    Program(path="script.py"),
    Program(path="script.pyc"),
    Program(path="whole"),
    Program(path="runs.zip"),
    Program(module="script"),
    Program(module="runs"),
    Program(module="runs.part"),
    Program(module="package.part"),
    Program(module="elsewhere.part"),
    Program(module="json.tool"),
    Program(module="timeit"),
    Program(module="torch.distributed.run"),
    Program(path="/dev/null"),
)


@pytest.mark.parametrize("program", RUN, ids=lambda program: program.subject)
def test_what_python_runs_passes(program: Program) -> None:
    before = set(sys.modules)
    check_program(program)
    assert not {"script", "runs", "package", "elsewhere"} & (set(sys.modules) - before)


def test_the_command_says_it_in_a_line_and_ends_with_two() -> None:
    done = run_hal("audit", "run", "bare")
    assert done.returncode == 2
    assert "the folder 'bare' without one" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_hal("audit", "run", "-m", "package")
    assert done.returncode == 2
    assert "the package 'package' without one" in done.stderr
    assert "Traceback" not in done.stderr


def test_compiled_python_runs_as_python_runs_it(folder: Path) -> None:
    assert (folder / "script.pyc").read_bytes().startswith(importlib.util.MAGIC_NUMBER)
    plain = subprocess.run([sys.executable, "script.pyc"], capture_output=True, text=True)
    assert plain.stdout == "ran\n"
    done = run_hal("audit", "run", "script.pyc")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
