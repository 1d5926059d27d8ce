"""A hook that never comes back ends the command with the plug-in's name; one that does is free."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hal.plugins import watchdog
from hal.plugins.listing import PluginEntry, list_plugins
from hal.plugins.watchdog import (
    EXIT_CODE,
    SLOW_FACTOR,
    HookWatchdog,
    WatchedHook,
    watched_candidate,
)
from hal.tiers import Tier
from hal_process import SUPPORT

ENTRY = PluginEntry(name="acme", value="acme_plugin", distribution="hal-acme", version="1.0")


class Heard:
    """What a watchdog reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.hooks: list[WatchedHook] = []
        self._has_one = threading.Event()

    def __call__(self, watched: WatchedHook) -> None:
        self.hooks.append(watched)
        self._has_one.set()

    def wait(self) -> None:
        assert self._has_one.wait(60)


def test_a_hook_that_is_late_is_reported_once_and_by_name() -> None:
    heard = Heard()
    with HookWatchdog(0.05, heard).watch(ENTRY, "hal_kernel_candidates"):
        heard.wait()
        time.sleep(0.6)  # three looks later it is still late
    assert [watched.hook for watched in heard.hooks] == ["hal_kernel_candidates"]
    text = str(heard.hooks[0].error())
    assert "hal-acme" in text
    assert "hal_kernel_candidates" in text
    assert "plugins.hook_deadline_s" in text


def test_time_counts_for_each_hook_and_only_while_it_runs() -> None:
    heard = Heard()
    one = HookWatchdog(60.0, heard)
    for _ in range(3):
        with one.watch(ENTRY, "hal_device_policy"):
            time.sleep(0.05)
    with (
        one.watch(ENTRY, "hal_create_runtime"),
        HookWatchdog(0.05, heard).watch(ENTRY, "inner"),
    ):
        heard.wait()
    assert [watched.hook for watched in heard.hooks] == ["inner"]


def test_a_slow_hook_has_more_time() -> None:
    heard = Heard()
    with HookWatchdog(0.02, heard).watch(ENTRY, "hal_create_runtime"):
        heard.wait()
    assert heard.hooks[0].allowed_s == pytest.approx(0.02 * SLOW_FACTOR)


def test_an_error_of_a_hook_passes_and_ends_its_time() -> None:
    heard = Heard()
    one = HookWatchdog(60.0, heard)
    with pytest.raises(RuntimeError), one.watch(ENTRY, "hal_device_policy"):
        raise RuntimeError
    assert one._watched == []
    assert heard.hooks == []


def test_no_thread_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_IDLE_S", 0.05)
    heard = Heard()
    one = HookWatchdog(60.0, heard)
    with one.watch(ENTRY, "hal_device_policy"):
        thread = one._thread
        assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    one._deadline_s = 0.05
    with one.watch(ENTRY, "hal_device_policy"):  # and the next one is watched all the same
        heard.wait()


def test_answers_of_a_candidate_are_watched(candidate: Any) -> None:
    heard = Heard()
    slow = dataclasses.replace(
        candidate("acme.gemm.one", Tier.NATIVE), not_supported_reasons=lambda request: heard.wait()
    )
    watched = watched_candidate(HookWatchdog(0.05, heard), ENTRY, slow)
    watched.not_supported_reasons(None)
    assert "not_supported_reasons of acme.gemm.one" in heard.hooks[0].hook
    assert watched.load is slow.load


_PLUGIN = """
    import time
    from hal import hookimpl
    from hal.hookspecs import BackendInfo

    @hookimpl
    def hal_backend_info():
        return BackendInfo(name="hanging", vendor="Acme", api_range=">=1.0,<2")

    @hookimpl
    def hal_detect_devices(host):
        from hal.device import DetectedDevice
        return [DetectedDevice(device_id="hanging:0", vendor="Acme", name="One", arch="a1")]

    @hookimpl
    def hal_describe_device(device, host):
        {hang}
"""


@pytest.mark.parametrize(
    "hang",
    ["time.sleep(1000)", "import re; re.match(r'(a|a)*$', 'a' * 60 + 'b')"],
    ids=["sleeps", "holds the interpreter's lock"],
)
def test_a_command_ends_instead_of_waiting_for_ever(tmp_path: Path, hang: str) -> None:
    (tmp_path / "hanging_plugin.py").write_text(textwrap.dedent(_PLUGIN.format(hang=hang)))
    folder = tmp_path / "hal_hanging-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-hanging\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hal.backends]\nhanging = hanging_plugin\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from hal.cli.app import main; main(['devices'])"
    )
    others = ",".join(entry.name for entry in list_plugins() if entry.name != "hanging")
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "HAL_PLUGINS_HOOK_DEADLINE_S": "2",
            "HAL_PLUGINS_DISABLE": others,
        },
        cwd=SUPPORT.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode in (EXIT_CODE, 1)
    said = ended.stderr
    if "Timeout" in said:  # the interpreter's own words, where no other thread gets in
        assert "hanging_plugin.py" in said
    else:
        assert "hal-hanging" in said
        assert "hal_describe_device" in said
