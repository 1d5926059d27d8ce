"""Fixtures that several packages' tests share."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fresh_draws import VARIABLE, run_seed
from hal_engine.fetch_smollm2 import fetch_smollm2

# Read when a kernel is defined, by whichever test imports it first: in this process Triton kernels
# are interpreted (tests/support/faithful_interpreter.py), and compiled in processes without it.
os.environ["TRITON_INTERPRET"] = "1"

run_seed()  # before any worker of pytest-xdist starts, which inherits it

ROOT = Path(__file__).resolve().parent.parent
MODEL_CACHE = ROOT / "models"  # the folder `make serve` uses


def pytest_report_header() -> str:
    """To repeat a run whose random inputs failed."""
    return f"{VARIABLE}={run_seed()}"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct (Q4_1), downloaded once; the tests fail without it."""
    return fetch_smollm2(MODEL_CACHE)


@pytest.fixture(scope="session")
def build_options() -> list[str]:
    """pip's options for building: without isolation where the build backend is installed."""
    is_installed = importlib.util.find_spec("hatchling") is not None
    return ["--quiet", "--no-deps", *(["--no-build-isolation"] if is_installed else [])]


@pytest.fixture(scope="session")
def example_target(tmp_path_factory: pytest.TempPathFactory, build_options: list[str]) -> Path:
    """A folder that holds the installed example plug-in, as `pip install --target` leaves it."""
    target = tmp_path_factory.mktemp("example-plugin")
    pip = [sys.executable, "-m", "pip", "install", *build_options, "--target", str(target)]
    subprocess.run([*pip, str(ROOT / "examples" / "hal-example")], check=True, timeout=240)
    return target
