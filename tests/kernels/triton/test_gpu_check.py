"""The script for a borrowed GPU runs through, on a CPU, with every number right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_check.py"


@pytest.mark.long
def test_the_dry_run_is_right() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 wrong" in ended.stdout
