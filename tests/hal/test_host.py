"""Hosts: the local one and a recorded one give the same answers; commands are bounded."""

import os
import sys
import time
from pathlib import Path

import pytest

from hal.errors import HostReadError
from hal.host import PYTHON, CommandOutput, HostProbe, LocalHost, RecordedHost


def test_both_hosts_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "vendor").write_text("0x10de\n")
    (tmp_path / "name").write_text("Größe")
    (tmp_path / "alias").symlink_to("sub")
    (tmp_path / "chain").symlink_to(tmp_path / "alias")
    monkeypatch.setenv("ACME_VISIBLE", "0,1")
    recorded = RecordedHost(
        files={f"{tmp_path}/sub/vendor": "0x10de\n", f"{tmp_path}/name": "Größe"},
        environment={"ACME_VISIBLE": "0,1"},
        packages={"pluggy": LocalHost().package_version("pluggy") or "?"},
        commands={"echo one two": CommandOutput(0, "one two\n", "")},
        links={f"{tmp_path}/alias": f"{tmp_path}/sub", f"{tmp_path}/chain": f"{tmp_path}/alias"},
        modules=frozenset({"pluggy"}),
        package_files={"pluggy": {"pluggy/py.typed": ""}},
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
            host.read_text(f"{tmp_path}/chain/vendor"),
            host.list_dir(f"{tmp_path}/alias/"),
            host.exists(f"{tmp_path}/alias"),
            host.read_link(f"{tmp_path}/chain"),
            host.read_link(f"{tmp_path}/alias"),
            host.read_link(f"{tmp_path}/sub"),
            host.read_link(f"{tmp_path}/missing"),
            host.has_module("pluggy"),
            host.has_module("no_such_module_anywhere"),
            host.package_file("pluggy", "pluggy/py.typed"),
            host.package_file("Pluggy", "pluggy/no-such-file"),
            host.package_file("no-such-distribution", "x.py"),
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
    assert answers[0][4] == ("alias", "chain", "name", "sub")
    assert answers[0][8:15] == ("0x10de\n", ("vendor",), True, *[f"{tmp_path}/sub"] * 2, None, None)
    assert answers[0][15:20] == (True, False, "", None, None)


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


def test_python_command_and_package_files_need_no_import(tmp_path: Path) -> None:
    output = LocalHost().run_command([PYTHON, "-c", "import sys; print(sys.executable)"], 60)
    assert output == CommandOutput(0, f"{sys.executable}\n", "")
    recorded = RecordedHost(commands={"{python} -c 1": CommandOutput(0, "", "")})
    assert recorded.run_command([PYTHON, "-c", "1"], 1) == CommandOutput(0, "", "")
    version = LocalHost().package_file("torch", "torch/version.py")
    assert version is not None
    assert "__version__" in version


def test_python_command_takes_no_module_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_smi.py").write_text("")
    monkeypatch.chdir(tmp_path)
    output = LocalHost().run_command([PYTHON, "-c", "import acme_smi"], 60)
    assert output is not None
    assert output.exit_code == 1


def test_module_is_found_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_found.py").write_text("raise SystemExit('imported')")
    (tmp_path / "acme_namespace").mkdir()
    (tmp_path / "acme_namespace" / "part.py").write_text("raise SystemExit('imported')")
    (tmp_path / "acme_leftover" / "__pycache__").mkdir(parents=True)
    host = LocalHost()
    found = [host.has_module(f"acme_{name}") for name in ("found", "namespace", "leftover")]
    assert found == [True, True, False]
    assert not [name for name in sys.modules if name.startswith("acme_")]
    for wrong in ("acme_found.sub", "", "a b", "os.path"):
        for probe in (host, RecordedHost()):
            with pytest.raises(HostReadError, match="top-level"):
                probe.has_module(wrong)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "torch/../../x", "", "a\0b"])
def test_package_file_stays_in_the_distribution(path: str) -> None:
    for probe in (LocalHost(), RecordedHost()):
        with pytest.raises(HostReadError, match="relative"):
            probe.package_file("torch", path)


def test_distribution_names_are_one() -> None:
    host = RecordedHost(packages={"Flash_Attn": "2.8.3"}, package_files={"flash.attn": {"a": "b"}})
    assert host.package_version("flash-attn") == "2.8.3"
    assert host.package_file("FLASH-attn", "a") == "b"


def test_recorded_links_lead_to_the_same_files_from_both_sides() -> None:
    """Recordings hold paths as they were asked for: through links, or not."""
    real = "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    host = RecordedHost(
        files={
            "/sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
            f"{real}/device": "0x2bb5\n",
            "/sys/bus/pci/devices/0000:01:00.0/numa_node": None,
        },
        links={
            "/sys/bus/pci/devices/0000:01:00.0": real,
            "/sys/bus/pci/devices/0000:01:00.0/driver": "/sys/bus/pci/drivers/nvidia",
            "/sys/class/drm/card0/device": "/sys/bus/pci/devices/0000:01:00.0",
        },
        nodes=frozenset({"/sys/bus/pci/drivers/nvidia/module"}),
    )
    assert RecordedHost.from_json(host.to_json()) == host
    for way in (real, "/sys/bus/pci/devices/0000:01:00.0", "/sys/class/drm/card0/device"):
        assert host.read_text(f"{way}/vendor") == "0x10de\n"
        assert host.list_dir(way) == ("device", "driver", "numa_node", "vendor")
        assert host.read_link(f"{way}/driver") == "/sys/bus/pci/drivers/nvidia"
        assert host.list_dir(f"{way}/driver") == ("module",)
        assert host.exists(f"{way}/driver/module")
        with pytest.raises(HostReadError, match="unreadable"):
            host.read_text(f"{way}/numa_node")
    assert host.list_dir("/sys/bus/pci/devices") == ("0000:01:00.0",)
    assert host.read_link("/sys/class/drm/card0/device") == real


def test_recorded_trouble_stays_trouble() -> None:
    host = RecordedHost(files={"/dev/acme": None}, commands={"acme-smi": None})
    for again in (host, RecordedHost.from_json(host.to_json())):
        with pytest.raises(HostReadError, match="does not end"):
            again.run_command(["acme-smi"], 5)
        with pytest.raises(HostReadError, match="unreadable"):
            again.list_dir("/dev/acme")


def test_links_in_a_circle_are_refused() -> None:
    with pytest.raises(HostReadError, match="circle"):
        RecordedHost(links={"/a": "/b", "/b": "/a"})
    with pytest.raises(HostReadError, match="circle"):
        RecordedHost(links={"/a": "/a/b"})
