"""`hal plugin new`: the skeleton works as it is, bad names are refused, nothing is overwritten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hal.cli.app import create_app
from hal.errors import UsageError
from hal.plugin_skeleton import checked_name, skeleton_files, write_skeleton


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(create_app(), [str(word) for word in ("plugin", "new", *arguments)])


def test_its_tests_pass(tmp_path: Path) -> None:
    result = _run("acme_npu", "--directory", tmp_path)
    assert result.exit_code == 0, result.output
    root = tmp_path / "hal-acme-npu"
    # A long path begins a line of its own in "next: cd … && …", too.
    lines = [line for line in result.output.splitlines() if "&&" not in line]
    listed = {line for line in lines if line.startswith(str(tmp_path))}
    assert listed == {str(path) for path in root.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 8


def test_it_is_installed_found_and_tested(tmp_path: Path, build_options: list[str]) -> None:
    """As a distribution: idle without its device, and its device plans with its kernel."""
    write_skeleton("acme", tmp_path)
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", *build_options, "--target", str(target)]
    subprocess.run([*pip, str(tmp_path / "hal-acme")], check=True, timeout=240)
    code = (
        "from hal.host import RecordedHost; from hal.plugins.manager import load_backends; "
        "import json; from hal.plugins.listing import list_plugins; "
        "host = RecordedHost(nodes=frozenset({'/dev/acme0'}), modules=frozenset({'torch'})); "
        "backends = load_backends(host); spec = backends.describe('acme:0'); "
        "runtime = backends.create_runtime(spec); "
        "print(json.dumps([[c.name for c in backends.candidates('norm.rms', spec)], "
        "[r.passed for r in backends.self_test(spec, runtime)], "
        "[str(s.status.value) for s in load_backends(RecordedHost()).states "
        "if s.entry.name == 'acme']]))"
    )
    path = os.pathsep.join(p for p in (str(target), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    names, passed, without = json.loads(done.stdout)
    assert names == ["acme.norm.rms.plain", "reference.norm.rms"]
    assert passed == [True]
    assert without == ["idle"]


def test_nothing_is_left_to_fill_in() -> None:
    for path, text in skeleton_files("acme").items():
        assert "$" not in path
        assert "${" not in text
        if path.endswith(".py"):
            compile(text, path, "exec")


@pytest.mark.parametrize(
    "name",
    ["", "a", "Acme", "9a", "a b", "acme-npu", "../x", "a.b", "_a", "class", "a" * 32, "ä2", "a\n"],
)
def test_a_bad_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a-z, 0-9 and _"):
        write_skeleton(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_remedy_is_a_name_that_would_do() -> None:
    for bad in ("Acme NPU!", "acme-npu", "class", "12", "", "ACME"):
        with pytest.raises(UsageError) as caught:
            checked_name(bad)
        suggested = re.search(r"'(.+)'", caught.value.remedy)
        assert suggested is not None
        assert checked_name(suggested[1])


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="halstack:cpu"):
        write_skeleton("cpu", tmp_path)
    with pytest.raises(UsageError, match="reserved"):
        write_skeleton("halstack", tmp_path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "hal-acme" / "README.md"
    mine.parent.mkdir()
    mine.write_text("mine", encoding="utf-8")
    result = _run("acme", "--directory", tmp_path)
    assert isinstance(result.exception, UsageError)
    assert "nothing is overwritten" in str(result.exception)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [mine]
    assert mine.read_text(encoding="utf-8") == "mine"


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "hal-acme").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="nothing is overwritten"):
        write_skeleton("acme", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=r"file/hal-acme"):
        write_skeleton("acme", tmp_path / "file")
