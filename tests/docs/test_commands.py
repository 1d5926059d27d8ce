"""The commands of the documents run as printed, and print what the documents show."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from document_blocks import ROOT, Block, all_blocks, commands_of
from shown_output import check_shown

INSTALL_EXAMPLE = "pip install ./examples/hal-example"  # done by a fixture, in a folder of its own


def _params(word: str) -> list[object]:
    """Blocks with that directive; `long` in it marks those that take minutes."""
    chosen = [b for b in all_blocks() if word in b.directive and b.language == "console"]
    assert chosen, f"no block is marked with {word}"
    marks = {True: [pytest.mark.long, pytest.mark.timeout(900)], False: []}
    return [pytest.param(b, id=b.name, marks=marks["long" in b.directive]) for b in chosen]


def run_block(block: Block, environment: dict[str, str]) -> None:
    """Runs the block's commands; the last one ends with what `exit N` says."""
    commands = [c for c in commands_of(block) if c.line != INSTALL_EXAMPLE]
    exit_code = 0
    if "exit" in block.directive:
        exit_code = int(block.directive[block.directive.index("exit") + 1])
    script = "\n".join(c.line for c in commands)
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == exit_code, done.stdout
    check_shown(tuple(line for c in commands for line in c.shown), done.stdout)


@pytest.mark.parametrize("block", _params("run"))
def test_command(
    block: Block,
    command_environment: dict[str, str],
    fresh_environment: dict[str, str],
    smollm2_gguf: Path,
) -> None:
    """The long ones load the model, and are spared the compilation of its kernels."""
    run_block(block, command_environment if "long" in block.directive else fresh_environment)


@pytest.mark.parametrize("block", _params("example"))
def test_command_with_example(
    block: Block, fresh_environment: dict[str, str], smollm2_gguf: Path, example_target: Path
) -> None:
    path = os.pathsep.join(
        part for part in (str(example_target), os.environ.get("PYTHONPATH", "")) if part
    )
    extra = {"PYTHONPATH": path, "EXAMPLE_ACCELERATOR": "1"}
    run_block(block, fresh_environment | extra)


def test_every_console_block_of_the_tour_is_run() -> None:
    """A command that is shown with `hal` and not run could rot unseen."""
    not_run = {
        block.name: command.line
        for block in all_blocks()
        if block.document == "README.md" and block.language == "console" and not block.directive
        for command in commands_of(block)
    }
    assert sorted({line.split()[0] for line in not_run.values()}) == ["curl", "make"]


def test_comparison_notices_a_wrong_line() -> None:
    printed = "embed   embedding   1-512   cpu.embedding.jit   native   17\n"
    check_shown(("embed embedding 1-256 cpu.embedding.jit native",), printed)
    with pytest.raises(AssertionError, match="not printed"):
        check_shown(("embed embedding 1-512 cpu.embedding.jit tuned",), printed)


def test_make_targets() -> None:
    """Every `make TARGET` of the documents is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    named = {
        match
        for block in all_blocks()
        for command in commands_of(block)
        for match in re.findall(r"^make ([a-z-]+)", command.line)
    }
    assert {"serve", "test", "setup"} <= named
    assert named <= targets
