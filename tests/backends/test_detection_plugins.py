"""The accelerators' plug-ins as the host process runs them: in children, beside hostile ones, and
cheap where there is nothing for them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from accelerator_plugins import BACKENDS
from hal.host import CommandOutput, RecordedHost, load_recorded_host
from hal.plugins.listing import PluginEntry, list_plugins
from hal.plugins.manager import load_backends
from hal.plugins.states import PluginStatus
from hal.plugins.survey import survey_plugins
from hal_backends.detecting.torch_probe import ask_torch, torch_probe_argv
from host_catalogue import FOLDER


def _entries() -> list[PluginEntry]:
    return [entry for entry in list_plugins() if entry.name in BACKENDS]


def test_every_accelerator_is_an_entry_point() -> None:
    points = importlib.metadata.entry_points(group="hal.backends")
    values = {point.name: point.value for point in points if point.name in BACKENDS}
    assert values == {name: f"hal_backends.{name}.plugin:plugin" for name in BACKENDS}


_LAZY = """
import json, sys
from hal.host import RecordedHost
from hal.plugins.calls import Plugin
from hal.plugins.listing import PluginEntry
from hal.plugins.loading import import_plugin, register_plugin
before = set(sys.modules)  # the core's own
hosts = [RecordedHost(), RecordedHost.from_json(open(sys.argv[1]).read())]
for name in sys.argv[2:]:
    entry = PluginEntry("halstack", name, f"hal_backends.{name}.plugin:plugin", "0")
    plugin = Plugin(register_plugin(entry, import_plugin(entry)))
    for host in hosts:
        assert not plugin.detect_devices(host) and not plugin.missing_dependencies(host), name
heavy = ("torch", "numpy", "pydantic", "yaml", "hal_capability_db", "hal_kernels")
print(json.dumps([name for name in heavy if name in set(sys.modules) - before]))
"""


def test_without_hardware_nothing_heavy_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAZY, str(FOLDER / "cpu-only.json"), *BACKENDS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        ("mixed-nvidia-amd", {"nvidia": 1, "amd": 1}),
        ("bi-v150-x8", {"iluvatar": 16}),
        ("kunlunxin-p800-x8", {"kunlunxin": 8}),
    ],
)
def test_devices_through_children_and_registry(name: str, backends: dict[str, int]) -> None:
    host = load_recorded_host(FOLDER / f"{name}.json")
    registry = load_backends(survey=survey_plugins(host, entries=_entries()))
    specs = [registry.describe(device.device_id) for device in registry.devices]
    assert {b: sum(spec.backend == b for spec in specs) for b in backends} == backends
    assert len(specs) == sum(backends.values())
    idle = [state for state in registry.states if state.entry.name not in backends]
    assert {state.status for state in idle} == {PluginStatus.IDLE}


def test_a_refusal_is_the_plugins_state() -> None:
    host = load_recorded_host(FOLDER / "nvidia-metax-torch.json")
    survey = survey_plugins(host, entries=_entries())
    assert not survey.claims()
    states = {state.entry.name: state for state in survey.states}
    assert states["nvidia"].status is PluginStatus.FAILED
    assert "PCI says nvidia" in states["nvidia"].reason
    assert "says metax" in states["nvidia"].reason
    assert states["metax"].status is PluginStatus.IDLE


_HOOKS = """
from hal.device import DetectedDevice
from hal.hookspecs import BackendInfo, hookimpl

@hookimpl
def hal_backend_info():
    return BackendInfo(name={name!r}, vendor="Acme", api_range=">=1.0,<2")

@hookimpl
def hal_detect_devices(host):
"""
_HOSTILE = {
    "raises": "raise RuntimeError('no')",
    "exits": "import os; os._exit(0)",
    "quits": "raise SystemExit(3)",
    "aborts": "import os; os.abort()",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "kills": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "hangs": "import time; time.sleep(1000)",
    "floods": "print('x' * 2**22); return []",
    "forks": "import os, time\nif os.fork() == 0: time.sleep(1000)\nreturn []",
    "lies": "return 'gpu'",
    "swears": "import sys; sys.stderr.write('\\x00' * 1000); return None",
    "closes": "import os; os.closerange(0, 256); return []",
}


def test_hostile_plugins_hide_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, body in _HOSTILE.items():
        source = _HOOKS.format(name=name) + textwrap.indent(body, "    ")
        (tmp_path / f"fake_hostile_{name}.py").write_text(source)
    hostile = [PluginEntry("hostile", name, f"fake_hostile_{name}", "1") for name in _HOSTILE]
    assert len(hostile) == 12
    host = load_recorded_host(FOLDER / "mixed-nvidia-amd.json")
    survey = survey_plugins(host, entries=[*hostile, *_entries()], deadline_s=30)
    owners = {owner.name for claimed in survey.claims().values() for owner in claimed}
    assert owners == {"nvidia", "amd"}
    registry = load_backends(survey=survey)
    assert len(registry.devices) == 2
    failed = {s.entry.name for s in survey.states if s.status is PluginStatus.FAILED}
    assert failed == set(_HOSTILE) - {"forks"}


def test_torch_answers_from_a_child() -> None:
    """This machine's torch, whatever it is, says what it has or why it has nothing. The command is
    run here without the deadline, which a crowded machine may miss, and read from a recording."""
    argv = torch_probe_argv("cuda", "")
    command = [sys.executable, *argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    printed = CommandOutput(done.returncode, done.stdout, done.stderr)
    report = ask_torch(RecordedHost(commands={" ".join(argv): printed}), "cuda", "")
    assert report.was_asked
    assert bool(report.names) != bool(report.problem), done.stderr


@pytest.mark.parametrize(
    ("stdout", "stderr", "exit_code", "problem"),
    [
        ("", "Traceback …\nImportError: libascend_hal.so: cannot open\n", 1, "ImportError: libasc"),
        ("hello\n", "", 0, "hello"),
        ("HALSTACK_TORCH {", "", 0, "answer not understood"),
        ('HALSTACK_TORCH {"devices": 3, "problem": ""}', "", 0, "answer not understood"),
        ('HALSTACK_TORCH {"devices": [{}], "problem": ""}', "", 0, "answer not understood"),
        ("", "", -11, "exit code -11"),
    ],
)
def test_what_the_child_may_leave(stdout: str, stderr: str, exit_code: int, problem: str) -> None:
    command = " ".join(torch_probe_argv("npu", "torch_npu"))
    host = RecordedHost(commands={command: CommandOutput(exit_code, stdout, stderr)})
    report = ask_torch(host, "npu", "torch_npu")
    assert report.was_asked
    assert not report.names
    assert problem in report.problem
