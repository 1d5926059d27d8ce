"""`hal kernels tune` as a user meets it: what it shows, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from absent_plans import plan, profile, profiles
from hal.cli import main
from hal.device import DeviceSpec
from hal.errors import DeviceNotFoundError, HalError
from hal.suggestions import did_you_mean
from hal_kernels.aot.targets import find_target
from hal_kernels.tuning import cli, tune_shapes
from hal_kernels.tuning.session import TuningSession
from hal_kernels.tuning.tunable_kernels import find_tunable

LISTS = "entries={},head_dim=512,heads=8,ratio=1,window=128,rows=16"
DEVICE = ("--device", "rtx-pro-6000-blackwell-ws")
SHAPE = ("--kernel", "gemm.fp8_block", "--shape", "n=2112,k=7168,rows=16")
Hal = Callable[..., tuple[int, str]]


class NothingHere:
    """A host without an accelerator that knows the database's devices, asked without probes."""

    devices = (SimpleNamespace(device_id="cpu:0"),)

    def describe(self, device_id: str) -> DeviceSpec:
        return DeviceSpec(
            device_id=device_id,
            vendor="cpu",
            backend="cpu",
            name="CPU",
            arch="x86_64",
            torch_device="cpu",
        )

    def profile(self, name: str) -> DeviceSpec:
        if name not in profiles():
            raise DeviceNotFoundError(
                f"device {name!r}", "one that is known", "none", did_you_mean(name, profiles())
            )
        return profile(name)


@pytest.fixture
def hal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compiler: Any) -> Hal:
    """hal(...) -> exit code and output, with a compiler in place of Triton's; errors are raised."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(cli, "cli_context", lambda _: SimpleNamespace(backends=NothingHere()))
    app = typer.Typer()
    app.command()(cli.tune_kernels)
    command = typer.main.get_command(app)

    def run(*arguments: str, **compiler_options: int) -> tuple[int, str]:
        def session(store: Path, timer: Any = None) -> TuningSession:
            return TuningSession(store, timer, compiler(**compiler_options))

        monkeypatch.setattr(cli, "TuningSession", session)
        code = command.main(list(arguments), standalone_mode=False)
        return int(code or 0), capsys.readouterr().out

    return run


def test_without_a_device_a_model_ranks_and_says_so(hal: Hal, data_home: Path) -> None:
    code, out = hal(*SHAPE, *DEVICE)
    assert code == 0
    assert "best (modelled)" in out
    assert "not measured" in out
    assert max(map(len, out.splitlines())) <= 100
    (path,) = data_home.rglob("*.json")
    assert path.parent.name == "rtx-pro-6000-blackwell-ws"
    assert str(path) in out.replace("\n", "")
    code, out = hal(*SHAPE, *DEVICE, "--json")
    (found,) = json.loads(out)["configurations"]
    assert (found["kernel"], found["basis"], found["is_complete"]) == (
        "gemm.fp8_block", "modelled", True,
    )  # fmt: skip
    assert found["best"]["us"] > 0


def test_an_interruption_says_that_the_same_command_goes_on(hal: Hal, data_home: Path) -> None:
    code, out = hal(*SHAPE, *DEVICE, interrupted_at=1)
    assert code == 130
    assert "same command" in out
    (path,) = data_home.rglob("*.json")
    assert len(json.loads(path.read_text())["entries"][0]["trials"]) == 1
    assert hal(*SHAPE, *DEVICE)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kernel", "gemm.dens", *SHAPE[2:], *DEVICE), "gemm.dense"),
        (("--kernel", "norm.rms", *SHAPE[2:], *DEVICE), "nothing is to be tuned"),
        ((*SHAPE, "--device", "mlu590"), "mtp_592"),
        ((*SHAPE, "--device", "rtx-509"), "rtx-5090"),
        (SHAPE, "--device"),
        ((*SHAPE, *DEVICE, "--measure"), "a device of this host"),
        ((*SHAPE[:3], "n=1,rows=2", *DEVICE), "required k too"),
        (DEVICE, "--shape or --model"),
        ((*SHAPE, "--model", "glm-5", *DEVICE), "both"),
        ((*SHAPE[2:], *DEVICE), "one --kernel"),
        (("--kernel", "gemm.mxfp8", *SHAPE[2:], "--device", "rtx-4090"), "gemm.mxfp8 is compiled"),
        (("--kernel", "gemm.fp8_block", *SHAPE[2:], "--device", "radeon-pro-w7900"), "gfx1100"),
    ],
    ids=[
        "kernel",
        "fixed",
        "target",
        "device",
        "none",
        "absent",
        "shape",
        "neither",
        "both",
        "all",
        "architecture",
        "no-fp8",
    ],
)
def test_what_cannot_be_tuned_is_refused(hal: Hal, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(HalError, match=re.escape(told)):
        hal(*arguments)


@pytest.mark.parametrize(
    ("kernel", "shape", "told"),
    [
        ("gemm.split_k", "form=w4g32,n=96,k=4096,rows=512", "rows up to 16"),
        ("gemm.split_k", "form=w4g32,n=96,k=512,rows=16", "k of 2048 or more"),
        ("gemm.split_k", "form=w4g128,n=96,k=4000,rows=16", "k as a multiple of 128"),
        ("gemm.split_k", "form=w8-gated,n=97,k=4096,rows=16", "an even n"),
        ("gemm.split_k", "form=w8,n=200000,k=4096,rows=16", "K stays whole"),
        ("gemm.weight_only", "form=w4g64,n=96,k=4000,rows=16", "k as a multiple of 64"),
        ("gemm.fp8_weight_only", "form=g128-gated,n=97,k=4000,rows=16", "an even n"),
        ("gemm.dense", "form=gated,n=97,k=4000,rows=16", "an even n"),
        (
            "compressed_attention.v41",
            f"form=fp4_288-sparse-decode,{LISTS.format(512)}",
            "more than 512",
        ),
        (
            "compressed_attention.v41",
            f"form=fp4_288-sparse-whole,{LISTS.format(513)}",
            "at most 512",
        ),
    ],
)
def test_a_class_that_no_launch_is_of_is_refused_before_the_work(
    hal: Hal, data_home: Path, kernel: str, shape: str, told: str
) -> None:
    with pytest.raises(HalError, match=re.escape(told)):
        hal("--kernel", kernel, "--shape", f"dtype=bfloat16,{shape}", *DEVICE)
    assert not [*data_home.rglob("*.json")]


def test_a_store_that_cannot_be_written_is_named(hal: Hal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HalError, match="can be written"):
        hal(*SHAPE, *DEVICE, "--store", str(tmp_path / "file" / "x"))


def test_a_damaged_store_is_named_and_kept(hal: Hal, data_home: Path) -> None:
    hal(*SHAPE, *DEVICE)
    (path,) = data_home.rglob("*.json")
    path.write_text("{}")
    with pytest.raises(HalError, match=re.escape(str(path))):
        hal(*SHAPE, *DEVICE)
    assert path.read_text() == "{}"


def test_the_classes_of_a_model_are_those_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    document = plan("deepseek-v4.1-flash", profile(DEVICE[1]), 8).to_dict()
    monkeypatch.setattr(tune_shapes, "_plan", lambda model, device: document)
    target = find_target("sm_120")
    found = tune_shapes.classes_of_model("v4", DEVICE[1], [find_tunable("gemm.mxfp8")], target)
    texts = [str(shape) for _, shape in found]
    assert len(set(texts)) == len(texts) > 8
    sizes = {(op["arguments"]["k"], op["arguments"]["n"]) for op in document["ops"]
             if any(use["kernel"] == "gemm.mxfp8" for use in op["kernels"])}  # fmt: skip
    assert {(shape.size("k"), shape.size("n")) for _, shape in found} == sizes
    with pytest.raises(HalError, match=r"attention\.decode"):
        tune_shapes.classes_of_model("v4", DEVICE[1], [find_tunable("attention.decode")], target)


@pytest.mark.long
def test_a_model_without_a_plan_says_what_its_plan_says() -> None:
    kernels, target = [find_tunable("gemm.mxfp8")], find_target("sm_120")
    with pytest.raises(HalError, match="no-such-model"):
        tune_shapes.classes_of_model("no-such-model", DEVICE[1], kernels, target)
    assert tune_shapes.classes_of_model("deepseek-v4.1-flash", f"{DEVICE[1]} x8", kernels, target)


@pytest.mark.long
def test_the_real_compiler_and_the_interpreter_measure_a_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven configurations compiled by Triton, each run by its interpreter through the launcher."""
    arguments = ["--kernel", "gemm.mxfp8", "--shape", "n=64,k=128,rows=4", *DEVICE, "--interpreter"]
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.raises(SystemExit) as raised:
        main(["kernels", "tune", *arguments, "--store", str(tmp_path), "--json"])
    assert not raised.value.code
    (found,) = json.loads(capsys.readouterr().out)["configurations"]
    assert found["device"] == "interpreter-sm_120"
    assert found["basis"] == "measured"
    assert found["best"]["tier"] == "native"
    assert found["best"]["us"] > 0
