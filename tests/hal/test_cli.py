"""The command `hal`: core commands, commands of plug-ins, errors, widths, start-up."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from hal.cli import main
from hal.device import DetectedDevice
from hal.hookspecs import BackendInfo
from hal.host import RecordedHost
from hal.plugins.listing import PluginEntry
from hal.plugins.probe import ProbeReport
from hal.plugins.survey import survey_of

HOSTS = Path(__file__).resolve().parent.parent / "fixtures" / "hosts"

ACME = """
import os
from pathlib import Path
from hal.device import DetectedDevice, DeviceSpec, Evidence, MissingDependency, SelfTestResult
from hal.hookspecs import BackendInfo, hookimpl

if "ACME_TRACE" in os.environ:
    with open(os.environ["ACME_TRACE"], "a") as stream:
        stream.write("imported\\n")

@hookimpl
def hal_backend_info():
    return BackendInfo(
        name="acme", vendor="Acme", api_range=">=1.0,<2",
        provides=frozenset({"devices", "commands"}),
    )

@hookimpl
def hal_detect_devices(host):
    return [DetectedDevice(device_id="acme:0", vendor="Acme", name="Acme One", arch="acme1")]

@hookimpl
def hal_describe_device(device, host):
    return DeviceSpec(
        device_id="acme:0", vendor="Acme", backend="acme", name="Acme One with a rather long name",
        arch="acme1", torch_device="cpu", num_cores=7, memory_bytes=3 * 2**30,
        peak_flops={"bfloat16": 2.5e12, "float32": 1.25e11},
        evidence={"num_cores": Evidence(source="/sys/acme/cores", found="7")},
    )

@hookimpl
def hal_measure_device(device):
    from dataclasses import replace
    return replace(device, memory_bandwidth=123.5e9)

class AcmeRuntime:
    torch_device = "cpu"
    num_threads = 1
    def create_group(self, rank, world_size, rendezvous): ...
    def free_memory_bytes(self): return 1
    def synchronize(self): ...

@hookimpl
def hal_create_runtime(device):
    return AcmeRuntime()

@hookimpl
def hal_self_test(runtime):
    is_fine = "ACME_BROKEN" not in os.environ
    return [SelfTestResult(name="gemm float32", passed=is_fine, detail="error 0.5")]

@hookimpl
def hal_missing_dependencies(host):
    if host.environ("ACME_MISSING"):
        return [MissingDependency(hardware="Acme Two", software="acme-driver", remedy="get it")]
    return []

@hookimpl
def hal_register_commands(cli):
    @cli.command()
    def greet(name: str, count: int = 1) -> None:
        "Greet somebody."
        print(f"hello {name} " * count)

    @cli.command()
    def explode() -> None:
        raise ValueError("a bug")

    @cli.command()
    def refuse() -> None:
        from hal.errors import UserError
        class ModelFileError(UserError, ValueError): pass
        raise ModelFileError("model 'x': no such file")
"""


@pytest.fixture
def acme(tmp_path: Path) -> Path:
    """A folder with the distribution acme-hal, whose plug-in has a device and commands."""
    add(tmp_path, "acme", ACME)
    return tmp_path


def add(folder: Path, name: str, source: str) -> None:
    (folder / f"cli_fake_{name}.py").write_text(source)
    info = folder / f"{name}_hal-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-hal\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{name} = cli_fake_{name}\n")


@dataclass(frozen=True)
class Done:
    """What one run of `hal` did."""

    returncode: int
    stdout: str
    stderr: str


class Hal(Protocol):
    """Runs `hal` in this process; the in-tree plug-ins are off where a folder is given."""

    def __call__(
        self,
        arguments: Sequence[str],
        site: Path | None = None,
        *,
        variables: dict[str, str] | None = None,
    ) -> Done: ...


@pytest.fixture
def hal(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Hal:
    """`hal` in this process, with an empty folder of measurements."""

    def run(
        arguments: Sequence[str],
        site: Path | None = None,
        *,
        variables: dict[str, str] | None = None,
    ) -> Done:
        for name in [name for name in sys.modules if name.startswith("cli_fake_")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("HAL_")]:
                patch.delenv(name)
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            if site is not None:
                patch.syspath_prepend(str(site))
                off = "halstack:cpu,halstack:engine,halstack:reference"
                patch.setenv("HAL_PLUGINS_DISABLE", off)
            for name, value in (variables or {}).items():
                patch.setenv(name, value)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out, err)

    return run


def test_doctor_list_runs_no_plugin_code(hal: Hal, acme: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    done = hal(["doctor", "--list", "--json"], acme, variables={"ACME_TRACE": str(trace)})
    assert done.returncode == 0, done.stderr
    entry = next(entry for entry in json.loads(done.stdout) if entry["name"] == "acme")
    assert entry["distribution"] == "acme-hal"
    assert entry["version"] == "2.5"
    assert entry["value"] == "cli_fake_acme"
    assert hal(["version"], acme, variables={"ACME_TRACE": str(trace)}).returncode == 0
    assert not trace.exists()
    hal(["doctor"], acme, variables={"ACME_TRACE": str(trace)})
    assert trace.read_text().count("imported") == 2  # once in its probe, once here


@pytest.mark.parametrize("arguments", [["version", "--json"], ["doctor", "--list", "--json"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys, atexit, resource\n"
        "def tell():\n"
        "    heavy = {'torch', 'numpy', 'hal_engine', 'hal_backends', 'hal_kernels'}\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    seconds = used.ru_utime + used.ru_stime\n"
        "    print(sorted(heavy & set(sys.modules)), seconds, file=sys.stderr)\n"
        "atexit.register(tell)\n"
        "from hal.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    modules, seconds = done.stderr.strip().rsplit(" ", 1)
    assert done.returncode == 0, done.stderr
    assert modules == "[]"
    assert float(seconds) < 2.0  # processor time: 0.3 s on an idle machine, more on a loaded one


def test_links_of_a_host_without_pairs_are_said_to_be_none(hal: Hal, acme: Path) -> None:
    done = hal(["devices", "--verify-links"])
    assert done.returncode == 0
    assert "No pairs" in done.stdout
    assert "none but its CPU" in done.stdout
    assert "Nothing was verified" in done.stdout
    document = json.loads(hal(["devices", "--verify-links", "--json"]).stdout)
    assert document["links"] == []
    refused = hal(["devices", "--verify-links", "--host", str(HOSTS / "l40s-x4-switch.json")])
    assert refused.returncode == 2
    assert "this machine" in refused.stderr


def test_the_picture_takes_the_place_of_the_list(hal: Hal) -> None:
    host = str(HOSTS / "l40s-x4-switch.json")
    picture = hal(["devices", "--topology", "--host", host]).stdout
    assert picture.startswith("NUMA node 0")
    assert "peak rates" not in picture
    assert "peak rates" in hal(["devices", "--host", host]).stdout


def test_devices(hal: Hal, acme: Path) -> None:
    done = hal(["devices", "--json"], acme)
    assert done.returncode == 0, done.stderr
    (device,) = json.loads(done.stdout)
    assert device["device_id"] == "acme:0"
    assert device["memory_bandwidth"] is None
    assert device["evidence"]["num_cores"]["source"] == "/sys/acme/cores"
    (measured,) = json.loads(hal(["devices", "--measure", "--json"], acme).stdout)
    assert measured["memory_bandwidth"] == 123.5e9
    table = hal(["devices", "--measure", "--evidence"], acme).stdout
    for word in ["acme:0", "3.0 GiB", "123.5 GB/s", "/sys/acme/cores", "probed"]:
        assert word in table
    assert_plain_and_narrow(table)


def test_no_device_is_exit_code_1(hal: Hal, tmp_path: Path) -> None:
    done = hal(["devices"], tmp_path)
    assert done.returncode == 1
    assert "hal doctor" in done.stdout


def test_doctor_tells_failures_and_missing_software(hal: Hal, acme: Path) -> None:
    done = hal(["doctor"], acme)
    assert done.returncode == 0, done.stdout
    assert "All is well" in done.stdout
    done = hal(["doctor"], acme, variables={"ACME_MISSING": "1"})
    assert done.returncode == 1
    assert "Missing: acme-driver. Remedy: get it" in " ".join(done.stdout.split())
    add(acme, "broken", "raise RuntimeError('broken build')")
    done = hal(["doctor", "--json"], acme)
    assert done.returncode == 1
    states = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert states["broken"]["status"] == "failed"
    assert "broken build" in states["broken"]["reason"]
    assert "Traceback" in states["broken"]["detail"]
    assert states["acme"]["status"] == "loaded"
    assert states["acme"]["devices"] == ["acme:0"]
    text = hal(["doctor", "-v"], acme).stdout
    assert "Traceback" in text
    assert_plain_and_narrow(text)


def test_memory_limit_of_a_probe_is_a_setting(hal: Hal, acme: Path) -> None:
    add(acme, "greedy", "held = []\nwhile True: held.append(bytearray(1 << 20))")
    done = hal(["doctor", "--json"], acme, variables={"HAL_PLUGINS_PROBE_MEMORY_MB": "300"})
    assert done.returncode == 1
    states = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    assert states["greedy"]["status"] == "failed"
    assert "at most 300 MiB of memory" in states["greedy"]["reason"]
    assert "plugins.probe_memory_mb" in states["greedy"]["reason"]
    assert states["acme"]["status"] == "loaded"


def test_self_test_in_doctor(hal: Hal, acme: Path) -> None:
    done = hal(["doctor", "--self-test", "--json"], acme)
    assert done.returncode == 0, done.stdout
    (check,) = json.loads(done.stdout)["self_test"]
    assert (check["device"], check["name"], check["passed"]) == ("acme:0", "gemm float32", True)
    done = hal(["doctor", "--self-test"], acme, variables={"ACME_BROKEN": "1"})
    assert done.returncode == 1
    assert "gemm float32" in done.stdout
    assert "error 0.5" in done.stdout


def test_two_claims_in_doctor_and_elsewhere(hal: Hal, acme: Path) -> None:
    add(acme, "rival", ACME.replace('name="acme"', 'name="rival"').replace("acme:0", "acme:0"))
    done = hal(["doctor", "--json"], acme)
    assert done.returncode == 1
    conflict = json.loads(done.stdout)["claim_conflict"]
    assert "acme-hal 2.5" in conflict["found"]
    assert "rival-hal 2.5" in conflict["found"]
    done = hal(["devices"], acme)
    assert done.returncode == 2
    assert "DeviceClaimError" in done.stderr
    disabled = "halstack:cpu,halstack:engine,halstack:reference,rival"
    done = hal(["devices", "--json"], acme, variables={"HAL_PLUGINS_DISABLE": disabled})
    assert done.returncode == 0, done.stderr


def test_command_of_a_plugin(hal: Hal, acme: Path) -> None:
    done = hal(["greet", "world", "--count", "2"], acme)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "hello world hello world"
    help_text = hal(["--help"], acme).stdout
    assert "Greet somebody." in help_text
    assert "doctor" in help_text
    assert_plain_and_narrow(help_text)
    done = hal(["greet", "world", "--cuont", "2"], acme)
    assert done.returncode == 2
    assert "--count" in done.stderr


def test_unknown_command_suggests_the_nearest(hal: Hal, acme: Path) -> None:
    done = hal(["gret"], acme)
    assert done.returncode == 2
    assert "did you mean 'greet'?" in done.stderr
    add(acme, "broken", "raise RuntimeError('broken build')")
    done = hal(["srve"], acme)
    assert done.returncode == 2
    assert "plug-in 'broken' of broken-hal 2.5 is failed" in done.stderr
    done = hal(["doctor", "--lsit"], acme)
    assert done.returncode == 2
    assert "--list" in done.stderr


def test_plugin_cannot_take_a_core_command(hal: Hal, acme: Path) -> None:
    add(acme, "greedy", ACME.replace('name="acme"', 'name="greedy"').replace("greet", "doctor"))
    done = hal(["greet", "x"], acme)
    assert done.returncode == 2
    assert "'doctor' belongs to hal itself" in done.stderr
    assert "greedy-hal" in done.stderr


def test_errors_have_no_traceback_unless_asked(hal: Hal, acme: Path, tmp_path: Path) -> None:
    config = tmp_path / "hal.toml"
    config.write_text('[plugins]\ndisalbe = ["x"]\n')
    done = hal(["--config", str(config), "devices"], acme)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean 'disable'?" in done.stderr
    assert "Traceback" not in done.stderr
    done = hal(["--debug", "--config", str(config), "devices"], acme)
    assert "Traceback" in done.stderr
    done = hal(["devices"], acme, variables={"HAL_PLUGIN_DISABLE": "x"})
    assert done.returncode == 2
    assert "did you mean 'HAL_PLUGINS_DISABLE'?" in done.stderr


def test_a_bug_in_a_command_is_not_taken_for_a_users_error(hal: Hal, acme: Path) -> None:
    with pytest.raises(ValueError, match="a bug"):
        hal(["explode"], acme)
    done = hal(["refuse"], acme)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: ModelFileError: model 'x': no such file"


def test_settings_shows_values_and_sources(hal: Hal, tmp_path: Path) -> None:
    secret = "a-very-secret-key"
    variables = {"HAL_SERVE_PORT": "9123", "HAL_SERVE_API_KEY": secret}
    done = hal(["settings", "--json"], variables=variables)
    assert done.returncode == 0, done.stderr
    rows = {row["key"]: row for row in json.loads(done.stdout)}
    assert rows["serve.port"]["value"] == 9123
    assert rows["serve.port"]["source"] == "HAL_SERVE_PORT"
    assert rows["engine.tp"]["source"] == "default"
    assert rows["serve.api_key"]["value"] == "**********"
    assert secret not in done.stdout
    table = hal(["settings", "--changed"], variables=variables).stdout
    assert "serve.port" in table
    assert "engine.tp" not in table
    assert_plain_and_narrow(hal(["settings"]).stdout)


def test_ops_lists_the_catalogue(hal: Hal) -> None:
    done = hal(["ops", "--json"])
    assert done.returncode == 0, done.stderr
    ops = {op["op"]: op for op in json.loads(done.stdout)}
    assert {"attention", "gemm", "norm.rms", "collective"} <= ops.keys()
    assert ops["attention"]["arguments"]["head_dim"] == "int"
    assert ops["mla_attention"]["arguments"]["kv_format"] == "'bf16' | 'fp16' | 'fp8_656'"
    assert "hyper_connection.head" in ops["hyper_connection"]["labels"]
    text = hal(["ops"]).stdout
    assert_plain_and_narrow(text)
    for op, fields in ops.items():
        assert re.search(rf"^ *{re.escape(op)} ", text, re.MULTILINE), op
        for name in set(fields["arguments"]) - {"phase", "tokens", "graph_mode"}:
            assert name in text


def assert_plain_and_narrow(text: str) -> None:
    """No colour on a pipe, no line beyond 100 columns."""
    assert "\x1b" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert re.search(r"\w", text)


def test_doctor_states_are_those_of_the_survey() -> None:
    """The survey that `hal doctor` prints does not depend on the order of the probes."""
    entries = [PluginEntry(f"d{n}", "x", "m", "1") for n in range(3)]
    reports = [
        ProbeReport(
            entry,
            BackendInfo(name="x", vendor="v", api_range=">=1"),
            (DetectedDevice(device_id="one:0", vendor="v", name="n", arch="a"),),
        )
        for entry in entries
    ]
    conflict = survey_of(RecordedHost(), entries, [], reports).claim_conflict()
    again = survey_of(RecordedHost(), entries[::-1], [], reports[::-1]).claim_conflict()
    assert conflict is not None
    assert again is not None
    assert str(conflict) == str(again)
    assert conflict.found.count(" and by ") == 2
