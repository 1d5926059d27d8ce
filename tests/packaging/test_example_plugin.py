"""An out-of-tree plug-in, installed as a user would: detected, refused with reasons, waived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from document_blocks import ROOT

EXAMPLE = ROOT / "examples" / "hal-example"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hal(example_target: Path) -> Run:
    """`hal` in an environment that has the example; EXAMPLE_ACCELERATOR as given."""

    def run(*arguments: str, accelerator: str = "1") -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(
            p for p in (str(example_target), os.environ.get("PYTHONPATH", "")) if p
        )
        environment = os.environ | {"PYTHONPATH": path, "EXAMPLE_ACCELERATOR": accelerator}
        command = [sys.executable, "-c", "from hal.cli import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return run


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path)


def _json(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_device_is_there_only_when_its_accelerator_is(hal: Run) -> None:
    with_it = {spec["device_id"] for spec in _json(hal("devices", "--json"))}
    without = {spec["device_id"] for spec in _json(hal("devices", "--json", accelerator=""))}
    assert with_it - without == {"example:0"}
    assert "cpu:0" in without


def test_plugin_without_devices_stays_idle(hal: Run) -> None:
    plugins = _json(hal("doctor", "--json", accelerator=""))["plugins"]
    (state,) = [p for p in plugins if p["distribution"] == "hal-example"]
    assert state["status"] == "idle"


def test_plan_is_refused_with_reasons_and_the_waivers_that_would_allow_it(
    hal: Run, model: str
) -> None:
    done = hal("plan", model, "--device", "example:0")
    assert done.returncode == 2
    assert "reference.embedding" in done.stdout  # the plan is shown, and then refused
    for op in ("attention.prefill", "attention.decode", "rope", "kv_write", "embedding"):
        assert f"({op}, " in done.stderr, op
        assert f'op = "{op}"' in done.stderr, op
    assert "(gemm, " not in done.stderr
    assert "at least tuned is required" in done.stderr
    assert done.stderr.count("[[waiver]]") == 6


def test_plan_with_its_waivers(hal: Run, model: str) -> None:
    waivers = str(EXAMPLE / "waivers.toml")
    plan = _json(hal("plan", model, "--device", "example:0", "--waivers", waivers, "--json", "-"))
    chosen = {(op["op"], op["choice"]) for op in plan["ops"]}
    assert ("gemm", "example.gemm.matmul") in chosen
    assert ("norm.rms", "example.norm.rms") in chosen
    for op in plan["ops"]:
        is_own = op["choice"].startswith("example.")
        assert (op["waiver"] is None) == is_own, op["site"]
        assert op["distribution"] == ("hal-example" if is_own else "halstack")
    products = [op for op in plan["ops"] if op["op"] == "gemm"]
    losers = {loser["name"] for op in products for loser in op["rejected"]}
    assert losers == {"reference.gemm"}


def test_an_explicit_choice_of_the_example_is_not_degraded(hal: Run, model: str) -> None:
    """The example's product is for float32 only: asking for it in bfloat16 is an error."""
    done = hal(
        "plan",
        model,
        "--device",
        "example:0",
        "--precision",
        "bf16",
        "--use",
        "gemm=example.gemm.matmul",
    )
    assert done.returncode == 2
    assert "dtype: float32" in done.stderr
    assert "dtype: bfloat16" in done.stderr
