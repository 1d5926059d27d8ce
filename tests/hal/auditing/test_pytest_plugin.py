"""The pytest plug-in, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
import torch
import torch.nn.functional as F

def attend():
    q = torch.randn(1, 2, 64, 32)
    for _ in range(3):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(64, 64))

@pytest.mark.hal_audit(no_fallback=True)
def test_loses():
    attend()

@pytest.mark.hal_audit(fail_on=("semantic",))
def test_another_class():
    attend()

@pytest.mark.hal_audit(no_fallback=True)
def test_clean():
    torch.mm(torch.ones(8, 8), torch.ones(8, 8))

def test_fixture(hal_audit):
    attend()
    assert any(f.rule == "sdpa-needless-mask" for f in hal_audit.finish().findings)

@pytest.mark.hal_audit(nonsense=1)
def test_unknown_option():
    pass

@pytest.mark.hal_audit(no_fallback=True)
def test_nothing():
    pass

@pytest.mark.hal_audit()
def test_nothing_without_a_gate():
    pass

@pytest.mark.hal_audit(no_fallback=True)
def test_own_failure():
    attend()
    assert False, "its own"
"""


def test_mark_and_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA"]
    command += ["-p", "no:cacheprovider", "--strict-markers", "-c", "none.ini"]
    (tmp_path / "none.ini").write_text("[pytest]\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    lines = [line.split(" - ")[0] for line in done.stdout.splitlines()]
    for name in ("another_class", "clean", "fixture", "nothing_without_a_gate"):
        assert f"PASSED test_them.py::test_{name}" in lines, done.stdout
    for name in ("loses", "unknown_option", "nothing", "own_failure"):
        assert f"FAILED test_them.py::test_{name}" in lines, done.stdout
    assert "test_them.py:9: an attention mask that is true everywhere" in done.stdout
    assert "nothing was observed" in done.stdout
    assert "AssertionError: its own" in done.stdout
