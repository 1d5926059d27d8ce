"""`hal audit run`: programs run as Python runs them, and are reported however they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hal.auditing.program import audit
from hal.auditing.program_runs import Program
from hal.auditing.report_files import read_report
from hal.auditing.session import active_session
from hal.cli import audit_run
from hal.errors import AuditError, UsageError

SCRIPT = """
import json, os, sys
import beside
import torch

what = sys.argv[1]
torch.mm(torch.ones(2, 2), torch.ones(2, 2))
print(json.dumps([__name__, sys.argv, sys.path[0], os.path.abspath(__file__)]))
if what == "exit":
    sys.exit(7)
if what == "message":
    sys.exit("no luck")
if what == "raise":
    raise ValueError("boom")
if what == "interrupt":
    raise KeyboardInterrupt
if what == "thread":
    import threading, time
    def late():
        time.sleep(0.2)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    threading.Thread(target=late).start()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script, and a process whose main module and path are restored."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(audit_run, "_describe_device", lambda trace: None)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "beside.py").write_text("")
    (folder / "main.py").write_text(SCRIPT)
    (folder / "__main__.py").write_text(SCRIPT)
    yield folder
    sys.modules.pop("beside", None)


def _run(*words: str, tmp_path: Path) -> tuple[int, Any]:
    report = tmp_path / "report.json"
    code = audit_run.run_program(["--json", str(report), *words])
    return code, read_report(report)


@pytest.mark.parametrize(
    ("what", "code"),
    [("fine", 0), ("exit", 7), ("message", 1), ("raise", 1), ("interrupt", 130), ("thread", 0)],
)
def test_exit_code_and_report(
    program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, code: int
) -> None:
    found, report = _run("program/main.py", what, "--json", tmp_path=tmp_path)
    out, err = capfd.readouterr()
    assert found == code
    calls = sum(row.calls for row in report.rows if "mm" in row.implementation)
    assert calls == (2 if what == "thread" else 1)
    name, argv, path, file = json.loads(out)
    assert name == "__main__"
    assert argv == ["program/main.py", what, "--json"]
    assert path == str(program)
    assert file == str(program / "main.py")
    assert "audit of program/main.py" in err
    if what == "message":
        assert "no luck" in err
    if what == "raise":
        trace = err[err.index("Traceback") : err.index("audit of")]
        assert "ValueError: boom" in trace
        assert trace.count("File ") == 1
        assert any("ended by ValueError" in note for note in report.notes)


def test_folder_and_module(
    program: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _run("program", "fine", tmp_path=tmp_path)[0] == 0
    assert json.loads(capfd.readouterr()[0])[2] == "program"
    monkeypatch.chdir(program)
    code, report = _run("-m", "main", "exit", tmp_path=program)
    assert code == 7
    assert json.loads(capfd.readouterr()[0])[1] == [str(program / "main.py"), "exit"]
    assert report.subject == "-m main exit"


def test_gate_counts_only_if_the_program_was_fine(
    program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (program / "main.py").write_text(
        "import sys, torch\n"
        "q = torch.randn(1, 2, 64, 32)\n"
        "for _ in range(3):\n"
        "    torch.nn.functional.scaled_dot_product_attention(\n"
        "        q, q, q, attn_mask=torch.zeros(64, 64))\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    options = ("--fail-on", "lost-fast-path", "program/main.py")
    assert _run(*options, "0", tmp_path=tmp_path)[0] == 1
    assert _run(*options, "5", tmp_path=tmp_path)[0] == 5
    assert _run("program/main.py", "0", tmp_path=tmp_path)[0] == 0
    (program / "main.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    assert _run(*options, "0", tmp_path=tmp_path)[0] == 1
    assert _run(*options, "9", tmp_path=tmp_path)[0] == 9
    assert capfd.readouterr()[1].count("Failed: nothing was observed") == 2


def test_words() -> None:
    split = audit_run.split_words
    assert split(["--mode", "light", "x.py", "--mode", "full"]) == (
        ["--mode", "light"],
        Program(path="x.py", words=("--mode", "full")),
    )
    assert split(["--mode=light", "-m", "pkg", "-m", "y"]) == (
        ["--mode=light"],
        Program(module="pkg", words=("-m", "y")),
    )
    assert split(["--", "-odd.py"]) == ([], Program(path="-odd.py"))
    assert split(["--mode", "light"])[1] is None


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no file"):
        audit_run.run_program(["nowhere.py"])


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    """With what only a whole process shows: `os._exit`, and no torch before the program's."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, sys\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'TORCH_DEVICE_BACKEND_AUTOLOAD' not in os.environ\n"
        "import torch\n"
        "torch.mm(torch.ones(2, 2), torch.ones(2, 2))\n"
        "os._exit(5)\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "TORCH_DEVICE_"))}
    command = [str(Path(sys.executable).parent / "hal"), "audit", "run", "--json", "r.json"]
    done = subprocess.run(
        [*command, str(script)],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 5, done.stderr
    assert any("mm" in row.implementation for row in read_report(tmp_path / "r.json").rows)


GARBAGE = """
import os, sys, torch
folder = os.environ["HALSTACK_AUDIT"]
def leave(name, text):
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)
for number, text in enumerate(['"x"', "[]", "[" * 100_000, '{"extra": {}}', "\\udc80", ""]):
    with open(os.path.join(folder, f"{number}.json"), "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
os.mkdir(os.path.join(folder, "7.json"))
os.mkfifo(os.path.join(folder, "8.json"))
os.symlink("/dev/zero", os.path.join(folder, "9.json"))
leave("nobody.started", "")
leave("9" * 30 + ".started", "")
torch.mm(torch.ones(2, 2), torch.ones(2, 2))
"""


def test_what_is_no_trace_in_the_folder_of_children_costs_no_report(
    program: Path, tmp_path: Path
) -> None:
    (program / "garbage.py").write_text(GARBAGE)
    code, report = _run(str(program / "garbage.py"), tmp_path=tmp_path)
    assert code == 0
    assert "9 traces of child processes could not be read" in report.notes
    assert any(row.implementation == "aten::mm" for row in report.rows)


CHILDREN = """
import subprocess, sys
run = "import torch; torch.mm(torch.ones(2, 2), torch.ones(2, 2))"
subprocess.run([sys.executable, "-c", run], check=True)
"""


@pytest.mark.parametrize("module", ["sitecustomize", "hal"])
def test_children_whose_modules_are_in_the_way(
    module: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "own"
    beside.mkdir()
    (beside / f"{module}.py").write_text('open("ran", "a").write("once ")\nraise RuntimeError')
    monkeypatch.setenv("PYTHONPATH", str(beside))
    (program / "parent.py").write_text(CHILDREN)
    code, report = _run(str(program / "parent.py"), tmp_path=tmp_path)
    assert code == 0
    if module == "hal":
        assert any(note.startswith("1 child processes were not heard") for note in report.notes)
        assert not Path("ran").exists()
    else:
        assert report.processes == 2
        assert Path("ran").read_text() == "once "


def test_files_of_the_program_with_names_that_are_taken(program: Path, tmp_path: Path) -> None:
    """What the report imports is not theirs; the program's own `torch` may be anything."""
    for name in ("typer", "html", "email", "xml", "csv", "fractions", "statistics", "colorsys"):
        (program / f"{name}.py").write_text("raise RuntimeError('the program never asked for it')")
    (program / "torch.py").write_text("value = 3")
    (program / "other.py").write_text("import torch; print(torch.value)")
    files = [f"--{kind}={tmp_path / kind}" for kind in ("html", "junit", "sarif", "markdown")]
    words = [str(Path(sys.executable).parent / "hal"), "audit", "run", *files, "other.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=program)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert "cannot be observed" in done.stderr
    assert "the program's own" in done.stderr
    assert "typer.py" in done.stderr


def test_a_program_whose_name_is_no_utf8(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", os.fsdecode(b"\xfe"))
    name = os.fsdecode(b"fine\xff.py")
    (program / name).write_text("import torch; torch.mm(torch.ones(2, 2), torch.ones(2, 2))")
    files = [f"--{kind}={tmp_path / kind}" for kind in ("html", "junit", "sarif", "markdown")]
    code, report = _run(*files, str(program / name), tmp_path=tmp_path)
    assert code == 0
    assert report.subject.endswith("fine\\udcff.py")
    assert "\\udcff" in report.rows[0].location.file
    assert all((tmp_path / kind).stat().st_size for kind in ("html", "junit", "sarif", "markdown"))


def test_a_report_is_not_written_over_its_program(program: Path) -> None:
    path = program / "main.py"
    with pytest.raises(UsageError, match="the program"):
        audit_run.run_program(["--json", str(path), str(program / ".." / "program" / "main.py")])
    assert path.read_text() == SCRIPT


def test_without_a_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prefix: str) -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(AuditError, match="TMPDIR"), audit():
        pass
    assert active_session() is None
