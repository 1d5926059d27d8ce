"""The Python blocks of docs/audit.md run: as a program, or as a test file of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from document_blocks import ROOT, Block, blocks_of

BLOCKS = [b for b in blocks_of(ROOT / "docs" / "audit.md") if b.language == "python"]


def test_every_python_block_is_run() -> None:
    assert {block.directive for block in BLOCKS} == {("python",), ("pytest",)}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "test_block.py"
    file.write_text(block.text, encoding="utf-8")
    command = [sys.executable, str(file)]
    if block.directive == ("pytest",):
        (tmp_path / "none.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", "--strict-markers", "-c", "none.ini", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
