"""`hal plan` for hardware that is not here: groups, hosts, comparisons, software, waivers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hal.cli import main
from hal.host import LocalHost
from hal.plugins import survey as surveying
from host_catalogue import FOLDER

Survey = surveying.PluginSurvey
survey_plugins = surveying.survey_plugins
MODEL = "llama-3-70b"


@functools.cache
def survey_here() -> Survey:
    return survey_plugins(LocalHost())


@dataclass(frozen=True)
class Ran:
    """One run of the command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Hal = Callable[..., Ran]


@pytest.fixture
def hal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Hal:
    """The command in this process; plug-ins are probed once for this machine."""

    def survey(host: Any = None, **options: Any) -> Survey:
        is_here = host is None or isinstance(host, LocalHost)
        return survey_here() if is_here else survey_plugins(host, **options)

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, shown.out, shown.err)

    monkeypatch.setattr(surveying, "survey_plugins", survey)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    return run


def test_a_group_of_known_devices(hal: Hal) -> None:
    ran = hal("plan", MODEL, "--device", "h200-sxm", "x8")
    assert ran.code == 2
    assert "8 × NVIDIA H200 SXM (h200-sxm)" in ran.out
    for part in ("Least time of a step", "Lost fast paths", "what unlocks", "memory: weights"):
        assert part in ran.out
    assert "lost fast paths:" in ran.err
    assert (
        "nvidia.attention.triton"
        in hal("plan", MODEL, "--device", "h200-sxm", "x8", "--losers").out
    )


def test_the_number_of_devices_may_be_said_in_three_ways(hal: Hal) -> None:
    forms = (
        ("--device", "mi300x", "x4"),
        ("--device", "mi300x x4"),
        ("--device", "mi300x:x4"),
        ("--device", "mi300x", "--tp", "4"),
        ("--device", "mi300x x4", "x4"),
    )
    found = [hal("plan", MODEL, *form, "--json", "-") for form in forms]
    assert {ran.code for ran in found} == {2}
    assert len({ran.document["hash"] for ran in found}) == 1
    assert len(found[0].document["devices"]) == 4


def test_fields_of_the_document(hal: Hal, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    ran = hal("plan", MODEL, "--device", "rtx-pro-6000-blackwell-server", "x8", "--json", target)
    assert (ran.code, ran.out) == (2, "")
    found = json.loads(target.read_text())
    assert found["schema"] == "halstack.plan/1"
    assert [device["rank"] for device in found["devices"]] == list(range(8))
    assert (found["link"]["kind"], found["link"]["p2p"]) == ("pcie", "claimed")
    assert found["link"]["evidence"]["source"]
    assert found["memory"]["weight_bytes"] < found["memory"]["memory_bytes"]
    assert [(step["phase"], step["tokens"]) for step in found["steps"]] == [
        ("decode", 1),
        ("decode", 32),
        ("prefill", 512),
    ]
    for step in found["steps"]:
        known = [site["us"] for site in step["sites"] if site["us"] is not None]
        assert step["total_us"] == pytest.approx(sum(known), abs=0.01 * len(known))
        lost = [site for site in step["sites"] if site["lost_us"]]
        assert lost
        assert all(site["better"] for site in lost)
    lost_ops = [op for op in found["ops"] if op["lost"]]
    assert all(op["lost"]["unlock"] for op in lost_ops if op["lost"]["better"])
    assert {v["kind"] for v in found["violations"]} == {"lost fast path"}
    assert {v["site"] for v in found["violations"]} == {op["site"] for op in lost_ops}
    rejected = [loser for op in found["ops"] for loser in op["rejected"]]
    assert all(
        {"what", "required", "found", "kind"} == set(r) for x in rejected for r in x["reasons"]
    )


def test_all_devices_of_a_recorded_host(hal: Hal) -> None:
    host = ("--host", FOLDER / "rtx-pro-6000-x8.json")
    whole = hal("plan", MODEL, *host, "--device", "all", "--json", "-").document
    assert len(whole["devices"]) == 8
    assert whole["devices"][0]["device_id"].startswith("0000:")
    assert whole["link"]["distance"] == "SYS"
    some = hal("plan", MODEL, *host, "--device", "all", "x2", "--json", "-").document
    assert len(some["devices"]) == 2
    assert some["link"]["distance"] != "SYS"
    more = hal("plan", MODEL, *host, "--device", "all", "x9")
    assert more.code == 2
    assert "at most the 8 of this host" in more.err
    mixed = hal("plan", MODEL, "--host", FOLDER / "mixed-nvidia-amd.json", "--device", "all")
    assert mixed.code == 2
    assert "devices of one kind" in mixed.err


def test_two_groups_side_by_side(hal: Hal) -> None:
    ran = hal("plan", MODEL, "--compare", "h200-sxm x8", "mi300x:x4")
    assert ran.code == 2
    for part in ("8 × NVIDIA H200 SXM", "4 × AMD Instinct MI300X", "ratio", "lost fast paths:"):
        assert part in ran.out
    found = hal("plan", MODEL, "x8", "--compare", "h200-sxm", "mi300x", "--json", "-")
    assert found.code == 2
    assert "--compare" in found.err
    both = hal(
        "plan", MODEL, "--tp", "8", "--compare", "h200-sxm", "mi300x", "--json", "-"
    ).document
    assert both["schema"] == "halstack.plan-comparison/1"
    assert [len(p["devices"]) for p in both["plans"]] == [8, 8]
    assert [p["devices"][0]["device_id"] for p in both["plans"]] == ["h200-sxm", "mi300x"]


def test_software_beside_an_absent_device_unlocks(hal: Hal) -> None:
    def choices(*more: str) -> set[str]:
        ran = hal("plan", MODEL, "--device", "h200-sxm", "x8", *more, "--json", "-")
        return {op["choice"] for op in ran.document["ops"]}

    without = choices()
    installed = choices("--with", "flashinfer-python=0.7.4")
    assert not any("flashinfer" in choice for choice in without)
    assert any("flashinfer" in choice for choice in installed)
    assert choices("--with", "flashinfer-python=0.1") == without


@pytest.mark.parametrize(
    ("model", "name"), [(MODEL, "metax-c550"), ("deepseek-v4.1-flash", "mi300x")]
)
def test_a_filled_template_of_waivers_lets_the_plan_pass_degraded(
    hal: Hal, tmp_path: Path, model: str, name: str
) -> None:
    """Of V4.1 too, some of whose call sites have names that others' patterns cover."""
    device = ("--device", name, "x8")
    template = tmp_path / "waivers.toml"
    ran = hal("plan", model, *device, "--waiver-template", template)
    assert ran.code == 2
    again = hal("plan", model, *device, "--waiver-template", template)
    assert again.code == 2
    assert "which exists" in again.err
    unfilled = hal("plan", model, *device, "--waivers", template)
    assert unfilled.code == 2
    assert "reason" in unfilled.err
    text = template.read_text()
    text = re.sub(r'reason = "<[^"]*>"', 'reason = "no kernels for this platform yet"', text)
    template.write_text(re.sub(r'owner = "<[^"]*>"', 'owner = "the hardware team"', text))
    passed = hal("plan", model, *device, "--waivers", template)
    assert passed.code == 0, passed.err
    assert "degraded: " in passed.out
    assert "the hardware team" in passed.out
    found = hal("plan", model, *device, "--waivers", template, "--json", "-")
    assert found.code == 0
    assert found.document["violations"] == []
    assert all(op["waiver"] for op in found.document["ops"] if op["lost"])
    # They are for this device: on another one they cover nothing.
    other = hal("plan", model, "--device", "bi-v150", "x8", "--waivers", template)
    assert other.code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "h200-smx", "x8"), "h200-sxm"),
        (("--device", "h200-sxm", "x0"), "x1 to x64"),
        (("--device", "h200-sxm", "8"), "write it as x8"),
        (("--device", "h200-sxm x900"), "x1 to x64"),
        (("--device", "h200-sxm x4", "x8"), "4 and 8"),
        (("--device", "h200-sxm", "x8", "--tp", "4"), "4 and 8"),
        (("--device", "h200-sxm", "x8", "x8"), "unexpected extra argument"),
        (("--with", "flash-attn=2.8.3"), "a device that is not here"),
        (("--device", "cpu:0", "--with", "flash-attn=2.8.3"), "a device that is not here"),
        (("--device", "h200-sxm", "--with", "flash-attn"), "NAME=VERSION"),
        (("--device", "h200-sxm", "--with", "flash-attn=newest"), "NAME=VERSION"),
        (("--device", "h200-sxm", "--with", "flash-attm=2.8.3"), "did you mean 'flash-attn'?"),
        (("--device", "h200-sxm", "--with", "torch-mlu-ops=1.3.2"), "none of them knows"),
        (("--device", "h200-sxm", "x8", "--json", "absent/file"), "No such file"),
        (("--device", "h200-sxm", "--compare", "h200-sxm", "mi300x"), "--compare"),
        (("--compare", "h200-sxm", "mi300y"), "mi300x"),
        (("--device", "h200-sxm", "--host", "absent.json"), "absent.json"),
        (("--device", "h200-sxm", "--use", "gemm=nvidia.gemm.torch_linera"), "torch_linear"),
        (("--device", "h200-sxm", "--set", "engine.tpp=8"), "engine.tp"),
    ],
)
def test_bad_input_is_said(hal: Hal, arguments: tuple[str, ...], said: str) -> None:
    ran = hal("plan", MODEL, *arguments)
    assert ran.code == 2
    assert said.lower() in ran.err.lower()
    assert "Traceback" not in ran.err
    assert not ran.out


def test_a_file_that_cannot_be_written_is_said_and_none_is_lost(hal: Hal, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for path, said in ((tmp_path, "exists"), (taken, "exists"), ("absent/file", "No such file")):
        ran = hal("plan", MODEL, "--device", "h200-sxm", "x8", "--waiver-template", path)
        assert ran.code == 2
        assert said in ran.err
        assert "Traceback" not in ran.err
    assert taken.read_text() == "mine"
