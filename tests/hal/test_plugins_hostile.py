"""Hostile plug-ins: whatever one does, the others' devices are found and the reason is told."""

import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hal.device import DetectedDevice
from hal.errors import DeviceClaimError, PluginError, ProbeLimitError, SettingsError
from hal.hookspecs import BackendInfo
from hal.host import LocalHost, RecordedHost
from hal.plugins.listing import PluginEntry, list_plugins
from hal.plugins.manager import PluginLoader, load_backends
from hal.plugins.probe import ProbeReport, probe_plugin
from hal.plugins.states import PluginStatus
from hal.plugins.survey import PluginSurvey, survey_of, survey_plugins
from hal.settings_sections import SettingsCatalogue
from plugin_sites import GOOD, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("fake_acme_")]:
        monkeypatch.delitem(sys.modules, name)
    return Site(tmp_path)


HOOKS = """
from hal.device import DetectedDevice
from hal.hookspecs import BackendInfo, hookimpl

@hookimpl
def hal_backend_info():
    return BackendInfo(name="bad", vendor="Bad", api_range=">=1.0,<2")

@hookimpl
def hal_detect_devices(host):
"""


def in_hook(body: str) -> str:
    return HOOKS + textwrap.indent(textwrap.dedent(body), "    ")


FAKE_REPORT = (
    '{"report": {"info": {"name": "bad", "vendor": "b", "api_range": ">=1", '
    '"provides": ["devices"]}, "devices": [{"device_id": "fake:0", "vendor": "b", '
    '"name": "n", "arch": "a", "evidence": []}], "missing": [], "error": null}}'
)

# name -> (source of the plug-in, state, words that the reason must have)
HOSTILE = {
    "raises at import": (
        "raise RuntimeError('no driver for you')",
        "failed",
        ["RuntimeError: no driver for you", "import of fake_"],
    ),
    "raises in a hook": (
        in_hook("raise OSError(5, 'register file unreadable')"),
        "failed",
        ["register file unreadable", "hal_detect_devices"],
    ),
    "SystemExit at import": ("raise SystemExit(0)", "failed", ["SystemExit"]),
    "SystemExit in a hook": (in_hook("raise SystemExit(0)"), "failed", ["SystemExit"]),
    "KeyboardInterrupt": (in_hook("raise KeyboardInterrupt"), "failed", ["hal_detect_devices"]),
    "os._exit(0) at import": ("import os; os._exit(0)", "failed", ["exit code 0", "import of"]),
    "os._exit(7) in a hook": (in_hook("import os; os._exit(7)"), "failed", ["exit code 7"]),
    "segfault": (
        in_hook("import ctypes; ctypes.string_at(0)"),
        "failed",
        ["SIGSEGV", "hal_detect_devices"],
    ),
    "stack overflow": (
        in_hook("def f(): return f()\nreturn f()"),
        "failed",
        ["RecursionError"],
    ),
    "spam on stdout": (
        in_hook("while True: print('spam' * 100)"),
        "failed",
        ["more output than allowed"],
    ),
    "spam on stderr": (
        "import sys\nwhile True: sys.stderr.write('spam' * 100)",
        "failed",
        ["more output than allowed"],
    ),
    "wrong API range": (
        GOOD.format(name="bad", device="bad:0", api=">=2"),
        "rejected",
        ["plug-in API >=2", "plug-in API 1.0", "hostile-"],
    ),
    "malformed API range": (
        GOOD.format(name="bad", device="bad:0", api="latest"),
        "rejected",
        ["version specifier", "'latest'"],
    ),
    "another name": (
        GOOD.format(name="cpu", device="bad:0", api=">=1"),
        "rejected",
        ["BackendInfo.name", "'cpu'"],
    ),
    "no hooks at all": ("x = 1", "rejected", ["hal_backend_info", "none"]),
    "an unknown hook": (
        in_hook("return []") + "\n@hookimpl\ndef hal_detect_device(host): return []\n",
        "rejected",
        ["did you mean 'hal_detect_devices'"],
    ),
    "an unknown hook argument": (
        in_hook("return []") + "\n@hookimpl\ndef hal_self_test(gpu): return []\n",
        "rejected",
        ["gpu"],
    ),
    "info of a wrong type": (
        "from hal.hookspecs import hookimpl\n@hookimpl\ndef hal_backend_info(): return {}\n",
        "failed",
        ["required BackendInfo", "dict"],
    ),
    "a string for devices": (in_hook("return 'gpu'"), "failed", ["list or tuple", "'gpu'"]),
    "None for devices": (in_hook("return None"), "failed", ["list or tuple", "None"]),
    "dicts for devices": (in_hook("return [{}]"), "failed", ["required DetectedDevice", "dict"]),
    "a number for a name": (
        in_hook("return [DetectedDevice(device_id='b:0', vendor='b', name=5, arch='a')]"),
        "failed",
        ["valid DetectedDevice", "name"],
    ),
    "one id twice": (
        in_hook("return [DetectedDevice(device_id='b:0', vendor='b', name='n', arch='a')] * 2"),
        "failed",
        ["'b:0' twice"],
    ),
    "an object whose repr raises": (
        in_hook("class C:\n    def __repr__(self): raise SystemExit(1)\nreturn C()"),
        "failed",
        ["its repr raised SystemExit"],
    ),
    "an exception whose str raises": (
        in_hook("class E(Exception):\n    def __str__(self): raise ValueError\nraise E"),
        "failed",
        ["its message raised ValueError"],
    ),
    "a million devices": (
        in_hook(
            "return [DetectedDevice(device_id=f'b:{i}', vendor='b', name='n', arch='a')"
            " for i in range(5000)]"
        ),
        "failed",
        ["at most 4096"],
    ),
    "a huge answer": (
        in_hook("return [DetectedDevice(device_id='b:0', vendor='b', name='n'*2**22, arch='a')]"),
        "failed",
        ["answer larger than"],
    ),
    "closes every pipe": (
        in_hook("import os; os.closerange(0, 256); return []"),
        "failed",
        ["hal_detect_devices"],
    ),
    "a fake result on stdout, then exit": (
        in_hook(f"import os; os.write(1, {FAKE_REPORT.encode()!r}); os._exit(0)"),
        "failed",
        ["no answer", "exit code 0"],
    ),
    "garbage on the result channel": (
        in_hook("import os, sys; os.write(int(sys.argv[1]), b'garbage'); return []"),
        "failed",
        ["not JSON"],
    ),
    "memory without end": (
        in_hook("held = []\nwhile True: held.append(bytearray(1 << 20))"),
        "failed",
        ["at most 1024 MiB of memory", "MemoryError", "plugins.probe_memory_mb"],
    ),
    "small pieces of memory without end": (
        "held = []\nwhile True: held.append(bytes(4096))",
        "failed",
        ["at most 1024 MiB of memory", "import of fake_"],
    ),
    "native memory without end": (
        in_hook(
            "import ctypes\nmalloc = ctypes.CDLL(None).malloc\nmalloc.restype = ctypes.c_void_p\n"
            "while True: ctypes.memset(malloc(ctypes.c_size_t(1 << 24)), 1, 1 << 24)"
        ),
        "failed",
        ["SIGSEGV", "1024 MiB of memory"],
    ),
    "kills its parent": (
        in_hook("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"),
        "failed",
        ["watched over it was killed"],
    ),
    "two reports": (
        in_hook(
            f"import os, sys; os.write(int(sys.argv[1]), {FAKE_REPORT.encode()!r} + b'\\n');"
            " return []"
        ),
        "failed",
        ["more on the result channel than one report"],
    ),
}


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[PluginSurvey, dict[str, str]]:
    """Every hostile plug-in, one that hangs, and two good ones in one survey."""
    site = Site(tmp_path_factory.mktemp("crowd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site.folder))
        site.add_good("alpha", "0000:01:00.0")
        site.add_good("zeta", "0000:02:00.0")
        site.add("hang", "import time\ntime.sleep(1000)")
        distributions = {}
        for number, (case, (source, _, _)) in enumerate(HOSTILE.items()):
            distributions[case] = f"hostile-{number:02}"
            site.add("bad", source, distribution=distributions[case])
        survey = survey_plugins(entries=site.entries(), deadline_s=15, memory_mb=1024)
        load_backends(survey=survey)
    return survey, distributions


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_plugin_is_explained(crowd: tuple[PluginSurvey, dict[str, str]], case: str) -> None:
    survey, distributions = crowd
    _, status, words = HOSTILE[case]
    name = distributions[case]
    state = next(state for state in survey.states if state.entry.distribution == name)
    assert state.status.value == status, state
    for word in [*words, f"{name} 1.0", "required", "remedy"]:
        assert word in state.reason, (word, state.reason)


def test_no_hostile_plugin_hides_a_device(crowd: tuple[PluginSurvey, dict[str, str]]) -> None:
    survey, _ = crowd
    assert list(survey.claims()) == ["0000:01:00.0", "0000:02:00.0"]
    hung = next(state for state in survey.states if state.entry.name == "hang")
    assert "no end after 15" in hung.reason
    registry = load_backends(survey=survey)
    assert [device.device_id for device in registry.devices] == ["0000:01:00.0", "0000:02:00.0"]
    assert not [name for name in sys.modules if name.startswith(("fake_hostile", "fake_acme_hang"))]


def test_hang_is_killed_with_its_children(site: Site, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    entry = site.add(
        "bad",
        f"""
        import os, time
        for detach in (False, True):
            pid = os.fork()
            if pid == 0:
                if detach:
                    os.setsid()
                with open({str(pids)!r}, "a") as stream:
                    stream.write(f"{{os.getpid()}}\\n")
                time.sleep(1000)
        time.sleep(1000)
        """,
    )
    started = time.monotonic()
    report = probe_plugin(entry, LocalHost(), deadline_s=4)
    assert time.monotonic() - started < 8
    assert report.error is not None
    assert "import of fake_acme_bad_bad" in report.error.who
    children = [int(line) for line in pids.read_text().split()]
    assert len(children) == 2
    _wait_until_gone(children)


def test_a_child_that_outlives_the_probe_is_killed_and_answers_nothing(
    site: Site, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    entry = site.add(
        "bad",
        in_hook(
            f"""
            import os, time
            if os.fork() == 0:
                open({str(pids)!r}, "w").write(str(os.getpid()))
                time.sleep(1000)
            time.sleep(0.5)
            os.fork()  # both come out of the hook; only the probed process may answer
            return [DetectedDevice(device_id="bad:0", vendor="b", name="n", arch="a")]
            """
        ),
    )
    report = probe_plugin(entry, LocalHost(), deadline_s=15)
    assert report.error is None
    assert [device.device_id for device in report.devices] == ["bad:0"]
    _wait_until_gone([int(pids.read_text())])


def test_a_plugin_that_stops_its_parent_is_over_in_time(site: Site) -> None:
    stop = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(60)"
    entry = site.add("bad", in_hook(stop))
    good = site.add_good("good", "good:0")
    survey = survey_plugins(entries=[entry, good], deadline_s=4)
    assert list(survey.claims()) == ["good:0"]
    assert "killed or stopped" in survey.states[0].reason


def test_a_plugin_that_kills_the_server_hides_no_other(site: Site) -> None:
    """The server is the parent of the parent; those it had not answered for get one each."""
    kill = """
    import os, signal
    stat = open(f"/proc/{os.getppid()}/stat").read()
    os.kill(int(stat.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    import time; time.sleep(60)
    """
    entries = [site.add_good("alpha", "a:0"), site.add("bad", in_hook(kill))]
    entries += [site.add_good("zeta", "z:0")]
    survey = survey_plugins(entries=entries, deadline_s=30)
    assert list(survey.claims()) == ["a:0", "z:0"]
    state = next(state for state in survey.states if state.entry.name == "bad")
    assert state.status is PluginStatus.FAILED
    assert "killed or stopped" in state.reason


def test_limit_errors_have_a_type_of_their_own(
    crowd: tuple[PluginSurvey, dict[str, str]],
) -> None:
    survey, distributions = crowd
    limits = {
        report.entry.distribution
        for report in survey.reports
        if isinstance(report.error, ProbeLimitError)
    }
    wanted = ["memory without end", "small pieces of memory without end", "spam on stdout"]
    wanted += ["spam on stderr", "a huge answer"]
    assert limits == {"acme-hang", *(distributions[case] for case in wanted)}


def test_commands_of_a_probe_may_have_more_memory_than_the_probe(site: Site) -> None:
    body = """
    import resource
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20)"
    inner = host.run_command(["{python}", "-c", script], 60).stdout.strip()
    raise ValueError(f"{resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20}, {inner}")
    """
    survey = survey_plugins(entries=[site.add("bad", in_hook(body))], memory_mb=300)
    assert "ValueError: 300, 1200" in survey.states[0].reason


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if _is_running(pid)]
        if not alive:
            return
        time.sleep(0.05)
    pytest.fail(f"still running: {alive}")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_environment_changes_stay_outside(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEEP", "kept")
    source = GOOD.format(name="bad", device="bad:0", api=">=1.0,<2")
    entry = site.add(
        "bad", "import os\nos.environ['ACME_KEEP'] = 'x'\nos.environ['ACME_NEW'] = 'y'\n" + source
    )
    registry = load_backends(survey=survey_plugins(entries=[entry]))
    assert os.environ["ACME_KEEP"] == "kept"
    assert "ACME_NEW" not in os.environ
    state = registry.states[0]
    assert state.status is PluginStatus.LOADED
    assert "ACME_KEEP, ACME_NEW" in state.reason


def test_probe_disables_torch_autoload(site: Site) -> None:
    body = "import os\nraise ValueError(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] + '!')"
    survey = survey_plugins(entries=[site.add("bad", in_hook(body))])
    assert "ValueError: 0!" in survey.states[0].reason


def test_fails_only_in_this_process(site: Site) -> None:
    """A plug-in may pass its probe and still fail here: its state says so, others stay."""
    source = f"import os\nif os.getpid() == {os.getpid()}: raise RuntimeError('only here')\n"
    bad = site.add("bad", source + GOOD.format(name="bad", device="bad:0", api=">=1"))
    good = site.add_good("good", "good:0")
    survey = survey_plugins(entries=[bad, good])
    registry = load_backends(survey=survey)
    assert [device.device_id for device in registry.devices] == ["good:0"]
    state = next(state for state in registry.states if state.entry == bad)
    assert state.status is PluginStatus.FAILED
    assert "only here" in state.reason
    with pytest.raises(PluginError, match="only here"):
        load_backends(selected=["bad"], survey=survey)


def test_two_claims_on_one_device(site: Site) -> None:
    first = site.add_good("alpha", "0000:01:00.0")
    second = site.add_good("beta", "0000:01:00.0")
    with pytest.raises(DeviceClaimError) as caught:
        load_backends(survey=survey_plugins(entries=[second, first]))
    text = str(caught.value)
    for word in ["0000:01:00.0", "acme-alpha 1.0", "acme-beta 1.0", 'plugins.disable = ["acme-']:
        assert word in text
    survey = survey_plugins(entries=[second, first], disabled=["alpha"])
    registry = load_backends(survey=survey)
    assert registry.plugin_for(registry.device("0000:01:00.0")).entry == second
    assert "plugins.disable" in next(s for s in registry.states if s.entry == first).reason


def test_idle_plugin_is_never_imported_unless_selected(site: Site) -> None:
    entry = site.add("idle", HOOKS.replace('"bad"', '"idle"') + "    return []\n")
    survey = survey_plugins(entries=[entry])
    registry = load_backends(survey=survey)
    assert registry.states[0].status is PluginStatus.IDLE
    assert "fake_acme_idle_idle" not in sys.modules
    registry = load_backends(selected=["idle"], survey=survey)
    assert registry.states[0].status is PluginStatus.LOADED
    assert "fake_acme_idle_idle" in sys.modules


def test_selected_and_disabled_names_are_checked(site: Site) -> None:
    survey = survey_plugins(entries=[site.add_good("alpha", "a:0")])
    with pytest.raises(PluginError, match="did you mean 'alpha'"):
        load_backends(selected=["alhpa"], survey=survey)
    with pytest.raises(PluginError, match="did you mean 'alpha'"):
        survey_plugins(entries=survey.entries, disabled=["alhpa"])
    with pytest.raises(SettingsError, match="both for acme-alpha:alpha"):
        load_backends(selected=["alpha"], disabled=["alpha"], survey=survey)


def test_selecting_a_failed_plugin_raises_its_reason(site: Site) -> None:
    survey = survey_plugins(entries=[site.add("bad", "raise RuntimeError('broken build')")])
    with pytest.raises(PluginError, match="broken build"):
        load_backends(selected=["bad"], survey=survey)


def test_recorded_host_reaches_the_child(site: Site) -> None:
    body = "raise ValueError(host.read_text('/sys/acme/id') + host.environ('ACME'))"
    entry = site.add("bad", in_hook(body))
    host = RecordedHost(files={"/sys/acme/id": "0x42"}, environment={"ACME": "=yes"})
    survey = survey_plugins(host, entries=[entry])
    assert "0x42=yes" in survey.states[0].reason


def test_listing_imports_nothing_and_survives_malformed_metadata(site: Site) -> None:
    site.add("bad", "raise SystemExit('imported')")
    broken = site.folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[hal.backends]\nthis is not an entry point\n")
    weird = site.folder / "weird-1.0.dist-info"
    weird.mkdir()
    (weird / "METADATA").write_text("Metadata-Version: 2.1\nName: weird\nVersion: 1.0\n")
    (weird / "entry_points.txt").write_text("[hal.backends]\nweird = os; rm -rf x\n")
    binary = site.folder / "binary-1.0.dist-info"
    binary.mkdir()
    (binary / "METADATA").write_bytes(b"Name: \xff\xfe\n")
    (binary / "entry_points.txt").write_bytes(b"[hal.backends]\nx = \xff\xfe\n")
    entries = site.entries()
    names = [entry.distribution for entry in entries]
    assert names == ["(unnamed)", "acme-bad", "broken", "weird"]
    assert SettingsCatalogue.installed().names  # the same files must not stop the settings
    survey = survey_plugins(entries=[entry for entry in entries if entry.name != "bad"])
    assert [state.status for state in survey.states] == [PluginStatus.REJECTED] * 3


def test_second_copy_of_a_distribution_is_shadowed(site: Site, tmp_path: Path) -> None:
    site.add_good("alpha", "a:0")
    later = Site(tmp_path / "later")
    later.folder.mkdir()
    later.add("alpha", "raise RuntimeError('the wrong copy')", version="2.0")
    entries = list_plugins([str(site.folder), str(later.folder)])
    states = {state.entry.version: state for state in survey_plugins(entries=entries).states}
    assert states["2.0"].status is PluginStatus.SHADOWED
    assert "acme-alpha 1.0" in states["2.0"].reason
    assert states["1.0"].status is PluginStatus.IDLE
    reverse = list_plugins([str(later.folder), str(site.folder)])
    assert {entry.version: bool(entry.shadowed_by) for entry in reverse} == {
        "1.0": True,
        "2.0": False,
    }


def test_order_of_listing_and_probing_changes_nothing() -> None:
    entries = [
        PluginEntry(f"dist-{letter}", name, f"pkg_{letter}.{name}", "1.0")
        for letter in "cabd"
        for name in ("two", "one")
    ]
    reports = [
        ProbeReport(
            entry,
            info=BackendInfo(name=entry.name, vendor="v", api_range=">=1"),
            devices=tuple(
                DetectedDevice(device_id=f"{entry.key}/{n}", vendor="v", name="n", arch="a")
                for n in range(index % 3)
            ),
            error=PluginError("w", "r", "f", "m") if index == 4 else None,
        )
        for index, entry in enumerate(entries)
    ]
    host = RecordedHost()
    seed = random.randrange(2**32)
    shuffler = random.Random(seed)
    results = set()
    for _ in range(100):
        shuffler.shuffle(entries)
        shuffler.shuffle(reports)
        survey = survey_of(host, entries, [], reports)
        claims = tuple(survey.claims().items())
        results.add((survey.states, tuple(r.entry for r in survey.reports), claims))
    assert len(results) == 1, f"seed {seed}"


def test_loader_loads_once(site: Site) -> None:
    entry = site.add_good("once", "o:0")
    loader = PluginLoader(survey_plugins(entries=[entry]))
    assert loader.load(entry) is loader.load(entry)
    assert load_backends(loader=loader).plugins[0] is loader.load(entry)


def test_import_hal_runs_no_plugin_and_no_torch(site: Site) -> None:
    site.add("bad", "raise SystemExit('a plug-in was imported')")
    script = (
        "import sys, hal, hal.plugins.manager, hal.cli, hal.settings, hal.waivers, hal.planner;"
        "bad = [m for m in sys.modules if m.split('.')[0] in"
        " ('torch', 'fake_acme_bad_bad', 'hal_backends', 'hal_engine', 'hal_kernels')];"
        "sys.exit(repr(bad) if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
