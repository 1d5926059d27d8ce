"""`hal audit MODEL` as a command: exit codes, files, wrong words, and the other forms beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hal.errors import UsageError
from hal_engine.cli.audit import parse_share, read_prompts
from hal_process import hal_without, run_hal

SET = ("--precision", "fp32", "--set", "engine.num_blocks=64", "--set", "engine.max_num_seqs=2")
SMALL = (*SET, "--set", "engine.max_num_batched_tokens=16")


def test_a_sound_model_passes(shallow_folder: Path, tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    done = run_hal(
        "audit", shallow_folder, *SMALL, "--json", report, "--html", page, "--verify", "1%"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed" in done.stdout
    document = json.loads(report.read_text())
    assert document["schema"] == "halstack.audit/1"
    assert document["kind"] == "model"
    assert document["machine"]["is_measured"]
    assert document["verification"]["compared_calls"] > 0
    assert page.read_text().startswith("<!")
    shown = run_hal("audit", "show", report)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"audit of {shallow_folder.name}")


def test_a_lost_fast_path_fails_with_its_report(shallow_folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_hal(
        "audit",
        shallow_folder,
        *SMALL,
        "--json",
        report,
        command=hal_without("cpu.norm.rms.jit"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(report.read_text())["findings"]
    lost = [f for f in findings if f["gate"] == "lost-fast-path"]
    assert {f["op"] for f in lost} == {"norm.rms"}
    assert all(f["site"] for f in lost)


@pytest.mark.parametrize("text", ["2", "0", "-1%", "101%", "much", "", "nan"])
def test_an_unfit_share(text: str) -> None:
    with pytest.raises(UsageError, match="a share above 0"):
        parse_share(text)


def test_shares() -> None:
    shares = [parse_share(text) for text in (None, "1%", "0.5", "100%", "1")]
    assert shares == [0.0, 0.01, 0.5, 1.0, 1.0]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  two words\n")
    assert read_prompts(path) == ["one", "  two words"]
    path.write_text("\n \n")
    for unfit in (path, tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match="option --prompts"):
            read_prompts(unfit)


def test_run_is_another_form(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys, torch\nprint(sys.argv[1:], torch.ones(2).sum().item())\n")
    done = run_hal("audit", "run", program, "--precision", "its own")
    assert done.returncode == 0, done.stderr
    assert "['--precision', 'its own'] 2.0" in done.stdout
