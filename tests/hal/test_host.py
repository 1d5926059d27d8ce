"""Hosts: the local one and a recorded one give the same answers; commands are bounded."""

import os
import sys
import time
from pathlib import Path

import pytest

from hal.errors import HostReadError
from hal.host import CommandOutput, HostProbe, LocalHost, RecordedHost


def test_both_hosts_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "vendor").write_text("0x10de\n")
    (tmp_path / "name").write_text("Größe")
    monkeypatch.setenv("ACME_VISIBLE", "0,1")
    recorded = RecordedHost(
        files={f"{tmp_path}/sub/vendor": "0x10de\n", f"{tmp_path}/name": "Größe"},
        environment={"ACME_VISIBLE": "0,1"},
        packages={"pluggy": LocalHost().package_version("pluggy") or "?"},
        commands={"echo one two": CommandOutput(0, "one two\n", "")},
    )
    hosts: list[HostProbe] = [LocalHost(), recorded, RecordedHost.from_json(recorded.to_json())]
    answers = [
        (
            host.read_text(f"{tmp_path}/sub/vendor"),
            host.read_text(f"{tmp_path}/name"),
            host.read_text(f"{tmp_path}/missing"),
            host.read_text(f"{tmp_path}/name/below-a-file"),
            host.list_dir(str(tmp_path)),
            host.list_dir(f"{tmp_path}/missing"),
            host.exists(f"{tmp_path}/sub"),
            host.exists(f"{tmp_path}/missing"),
            host.environ("ACME_VISIBLE"),
            host.environ("ACME_UNSET"),
            host.package_version("pluggy"),
            host.package_version("no-such-distribution"),
            host.run_command(["echo", "one", "two"], 10),
            host.run_command(["no-such-command-anywhere"], 10),
        )
        for host in hosts
    ]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][4] == ("name", "sub")


def test_unreadable_is_not_missing(tmp_path: Path) -> None:
    with pytest.raises(HostReadError, match="IsADirectoryError"):
        LocalHost().read_text(str(tmp_path))
    with pytest.raises(HostReadError, match="recorded as unreadable"):
        RecordedHost(files={"/dev/acme0": None}).read_text("/dev/acme0")
    if os.geteuid() != 0:  # root may read everything
        secret = tmp_path / "secret"
        secret.write_text("x")
        secret.chmod(0)
        with pytest.raises(HostReadError, match="PermissionError"):
            LocalHost().read_text(str(secret))


def test_endless_file_is_refused() -> None:
    with pytest.raises(HostReadError, match="bytes"):
        LocalHost().read_text("/dev/zero")


def test_command_past_its_deadline_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(HostReadError, match="killed"):
        LocalHost().run_command(["sleep", "600"], 0.5)
    assert time.monotonic() - started < 10


def test_command_that_prints_without_end_is_killed() -> None:
    with pytest.raises(HostReadError, match="more output than allowed"):
        LocalHost().run_command(["yes"], 30)


def test_command_gets_no_shell_and_reports_its_exit() -> None:
    output = LocalHost().run_command(["echo", "$HOME; ls"], 10)
    assert output == CommandOutput(0, "$HOME; ls\n", "")
    script = "import sys; sys.stderr.write('bad'); sys.exit(3)"
    assert LocalHost().run_command([sys.executable, "-c", script], 30) == CommandOutput(
        3, "", "bad"
    )
    killed = "import os; os.kill(os.getpid(), 9)"
    output = LocalHost().run_command([sys.executable, "-c", killed], 30)
    assert output is not None
    assert output.exit_code == -9


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 1}', '{"files": {"a": "b"}}'])
def test_bad_recording(text: str) -> None:
    with pytest.raises(HostReadError, match="recording"):
        RecordedHost.from_json(text)
