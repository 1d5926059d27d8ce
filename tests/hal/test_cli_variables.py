"""Variables at the command line: those of others are shown, unknown ones of ours are refused."""

from __future__ import annotations

import json

import pytest

from hal.auditing.foreign_variables import locked_environment
from hal.cli import main
from hal.host import LocalHost
from hal.plugins import survey as surveying


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in locked_environment():
        monkeypatch.delenv(name)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(
    "arguments",
    [
        ["version"],
        ["ops"],
        ["settings"],
        ["models"],
        ["diff", "a", "b"],
        ["doctor", "--list"],
        ["plugin", "new", "acme"],
        ["audit", "show", "report.json"],
        ["kernels", "list"],
        ["plan", "smollm2-135m-instruct"],
    ],
)
@pytest.mark.parametrize(
    ("name", "nearest"),
    [("HAL_ENGINE_PRECISON", "HAL_ENGINE_PRECISION"), ("HAL_CONFIGG", "HAL_CONFIG")],
)
def test_every_command_refuses_a_variable_that_nothing_knows(
    arguments: list[str],
    name: str,
    nearest: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, "1")
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert name in shown.err
    assert f"did you mean '{nearest}'" in shown.err
    assert shown.out == ""


def test_a_variable_of_another_command_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAL_SERVE_PORT", "9001")
    monkeypatch.setenv("HAL_DEBUG", "0")
    assert run("version") == 0
    assert "halstack" in capsys.readouterr().out


def test_settings_show_variables_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("settings") == 0
    assert "variable of others" not in capsys.readouterr().out
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("VLLM_SOMETHING", "\x1b[31m" * 80)
    assert run("settings", "--changed") == 0
    out = capsys.readouterr().out
    assert "NCCL_P2P_DISABLE=1" in out
    assert "through the host's memory" in " ".join(out.split())
    assert "\x1b" not in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert run("settings", "--json") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["$NCCL_P2P_DISABLE"]["value"] == "1"
    assert rows["$NCCL_P2P_DISABLE"]["source"] == "environment, NCCL"


def test_doctor_shows_variables_of_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = surveying.survey_plugins(LocalHost())
    monkeypatch.setattr(surveying, "survey_plugins", lambda *_, **__: found)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run("doctor") in (0, 1)
    out = capsys.readouterr().out
    assert "TRITON_INTERPRET=1" in out
    assert "slow" in out
    assert run("doctor", "--json") in (0, 1)
    variables = {v["name"]: v for v in json.loads(capsys.readouterr().out)["variables"]}
    assert variables["TRITON_INTERPRET"]["is_slow"]
