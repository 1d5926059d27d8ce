"""`hal lock` and `hal diff` of real plans: a variable, a wheel's version or a device's profile that
changes shows up as exactly that, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hal_backends.cpu.candidates as cpu_candidates
from hal.auditing import kernel_sources
from hal.auditing.foreign_variables import locked_environment
from hal.cli import main
from hal.device import DeviceSpec
from hal.host import LocalHost
from hal.plugins import survey as surveying
from hal.plugins.registry import BackendRegistry

MODEL = "smollm2-135m-instruct"
survey_plugins = surveying.survey_plugins


@functools.cache
def survey_here() -> surveying.PluginSurvey:
    return survey_plugins(LocalHost())


@dataclass(frozen=True)
class Ran:
    """One run of the command."""

    code: int
    out: str
    err: str


Hal = Callable[..., Ran]


@pytest.fixture
def hal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Hal:
    """The command in this process, without variables of others; plug-ins are probed once."""
    monkeypatch.setattr(surveying, "survey_plugins", lambda *_, **__: survey_here())
    for name in locked_environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, shown.out, shown.err)

    return run


@pytest.fixture
def locked(hal: Hal, tmp_path: Path) -> Path:
    """A lock of a real model on this machine."""
    ran = hal("lock", MODEL, "-o", tmp_path / "hal.lock")
    assert (ran.code, ran.err) == (0, "")
    return tmp_path / "hal.lock"


def changes_since(hal: Hal, locked: Path, *options: object) -> list[dict[str, Any]]:
    """What `hal lock --check` finds, which is what `hal diff` of two locks finds."""
    checked = hal("lock", MODEL, "--check", locked, "--json", "checked.json", *options)
    found: dict[str, Any] = json.loads(Path("checked.json").read_text())
    assert checked.code == int(bool(found["changes"]))
    assert hal("lock", MODEL, "-o", "new.lock", *options).code == 0
    ran = hal("diff", locked, "new.lock", "--json", "-")
    compared = json.loads(ran.out)
    assert compared == found
    assert ran.code == found["exit_code"]
    changes: list[dict[str, Any]] = found["changes"]
    return changes


def test_nothing_changed(hal: Hal, locked: Path) -> None:
    assert changes_since(hal, locked) == []
    document = json.loads(locked.read_text())
    assert document["schema"] == "halstack.lock/1"
    assert document["plan_hash"] == document["plan"]["hash"]
    assert {"python", "torch", "halstack", "numpy"} <= document["versions"].keys()
    assert document["environment"] == {}
    assert document["kernels"].keys() == {op["choice"] for op in document["plan"]["ops"]}
    for name, kernel in document["kernels"].items():
        assert kernel["source"], name
        assert any(m.startswith("hal_kernels.") for m in kernel["modules"]), (name, kernel)
    assert "Nothing differs." in hal("lock", MODEL, "--check", locked).out


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_P2P_DISABLE", "1"), ("OMP_NUM_THREADS", "2"), ("HAL_SERVE_PORT", "9001")],
)
def test_one_variable_shows_up_as_exactly_that(
    hal: Hal, locked: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    (change,) = changes_since(hal, locked)
    assert change["kind"] == "environment"
    assert (change["what"], change["old"], change["new"]) == (name, "unset", value)


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_one_wheel_shows_up_as_exactly_that(
    hal: Hal, locked: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    installed = importlib.metadata.version

    def version(asked: str) -> str:
        return "99.1" if asked == name else installed(asked)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (change,) = changes_since(hal, locked)
    assert (change["kind"], change["what"]) == ("version", name)
    assert (change["old"], change["new"]) == (installed(name), "99.1")


def test_one_profile_shows_up_as_exactly_that(
    hal: Hal, locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = BackendRegistry.describe

    def other(registry: BackendRegistry, device_id: str) -> DeviceSpec:
        spec = describe(registry, device_id)
        return dataclasses.replace(spec, features=spec.features | {"a_new_instruction"})

    monkeypatch.setattr(BackendRegistry, "describe", other)
    (change,) = changes_since(hal, locked)
    assert (change["kind"], change["what"]) == ("profile", "features")
    assert (change["old"], change["new"]) == ("", "a_new_instruction")


def test_one_kernel_shows_up_as_exactly_that(
    hal: Hal, locked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The source of one kernel is another file's: what an edit of it would be."""
    find = kernel_sources._file_of
    module = "hal_kernels.rope_kv_write.cpu"
    path = find(module)
    assert path is not None
    (tmp_path / "cpu.py").write_text(path.read_text() + "\n# another comment\n")
    monkeypatch.setattr(
        kernel_sources, "_file_of", lambda m: tmp_path / "cpu.py" if m == module else find(m)
    )
    (change,) = changes_since(hal, locked)
    assert (change["kind"], change["what"]) == ("kernel-source", "cpu.rope_kv_write.jit")


def test_a_setting_shows_with_what_comes_of_it(
    hal: Hal, locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = changes_since(hal, locked, "--precision", "w8")
    kinds = [change["kind"] for change in changes]
    assert kinds[0] == "semantics"
    assert [c["new"] for c in changes if c["what"] == "precision"] == ["w8"]
    ran = hal("lock", MODEL, "--check", locked, "--precision", "w8", "--fail-on", "device,slower")
    assert ran.code == int("slower" in kinds)
    assert "The worst: semantics." in ran.out
    assert max(len(line) for line in ran.out.splitlines()) <= 100


def test_plans_and_their_diff_for_a_pull_request(hal: Hal, tmp_path: Path) -> None:
    for name, precision in (("a", "w8"), ("b", "w8a8")):
        assert hal("plan", MODEL, "--precision", precision, "--json", f"{name}.json").code == 0
    ran = hal("diff", "a.json", "b.json", "--markdown", "diff.md")
    assert ran.code == 24
    assert "semantics" in ran.out
    text = Path("diff.md").read_text()
    assert text.startswith("<!-- hal diff -->\n### hal diff: semantics\n")
    assert "layers.0–29" in text
    assert hal("diff", "a.json", "b.json", "--fail-on", "device").code == 0
    assert hal("diff", "a.json", "a.json").code == 0


def test_a_command_line_that_makes_no_sense(hal: Hal, locked: Path) -> None:
    for arguments, words in (
        ((), "neither"),
        (("-o", "x", "--check", locked), "both"),
        (("-o", "x", "--fail-on", "slower"), "without it"),
        (("--check", locked, "--fail-on", "slwer"), "did you mean 'slower'"),
        (("--check", "none.lock"), "none.lock"),
        (("-o", "no/folder/x"), "no folder"),
    ):
        ran = hal("lock", MODEL, *arguments)
        assert ran.code == 2
        assert words in ran.err
    assert list(Path().iterdir()) == [Path("hal.lock")]


def test_a_plan_that_may_not_be_used_is_not_locked(
    hal: Hal, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything, chosen = cpu_candidates.candidates_for, "cpu.attention.decode.jit"
    monkeypatch.setattr(
        cpu_candidates,
        "candidates_for",
        lambda op, device: [c for c in everything(op, device) if c.name != chosen],
    )
    ran = hal("lock", MODEL, "-o", "hal.lock")
    assert ran.code == 2
    assert "lost fast paths" in ran.err
    assert not Path("hal.lock").exists()
