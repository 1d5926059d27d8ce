"""Runs the commands of the sample workflow (examples/audit-ci) as a runner would, on a small model.

`python tests/support/audit_ci.py` writes examples/audit-ci/comment.md anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hal.auditing.foreign_variables import locked_environment
from tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "audit-ci"
REMOVED = "cpu.attention.decode.jit"
TIMEOUT_S = 900
# A small load: one range of tokens, two sequences at a time.
_SMALL = {"HAL_ENGINE_MAX_NUM_SEQS": "2", "HAL_ENGINE_MAX_NUM_BATCHED_TOKENS": "32"}


def steps() -> dict[str, dict[str, Any]]:
    """The steps of the workflow that have an id."""
    workflow = yaml.safe_load((EXAMPLE / "audit.yml").read_text(encoding="utf-8"))
    return {step["id"]: step for step in workflow["jobs"]["audit"]["steps"] if "id" in step}


@dataclass
class Checkout:
    """A working tree in which the steps run; `removed` is taken out of the CPU back end."""

    folder: Path
    removed: str = ""
    output: list[str] = field(default_factory=list)

    def prepare(self) -> None:
        """A model with one layer, the prompts of the example, and a command `hal`."""
        make_tiny_model("llama", self.folder / "model", seed=11, num_layers=1)
        (self.folder / "prompts.txt").write_text((EXAMPLE / "prompts.txt").read_text())
        programs = self.folder / "bin"
        programs.mkdir()
        support = ROOT / "tests" / "support" / "hal_without.py"
        names = self.removed or "none"
        hal = programs / "hal"
        hal.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{support}" "{names}" "$@"\n')
        hal.chmod(0o755)

    def run(self, script: str) -> int:
        """Runs a script as a runner's `shell: bash` does; the exit status."""
        deciding = locked_environment()  # HAL_* and those of others
        clean = {k: v for k, v in os.environ.items() if k not in deciding}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=self.folder,
            env={
                **clean,
                **_SMALL,
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "MODEL": "model",
                "COLUMNS": "100",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.output.append(done.stdout + done.stderr)
        return done.returncode

    def comment(self) -> str:
        """What the last step would post, made by its own commands up to the one that posts."""
        script = steps()["comment"]["run"]
        assert self.run(script.partition("gh pr comment")[0]) == 0
        return (self.folder / "comment.md").read_text(encoding="utf-8")


def green_and_red(folder: Path) -> tuple[Checkout, Checkout]:
    """Both trees, ready: the second one has the first one's lock, and knows its report once there
    is one."""
    checkouts = []
    for name, removed in (("green", ""), ("red", REMOVED)):
        checkout = Checkout(folder / name, removed)
        checkout.folder.mkdir()
        checkout.prepare()
        checkouts.append(checkout)
    green, red = checkouts
    assert green.run('hal lock "$MODEL" -o hal.lock') == 0, green.output
    (red.folder / "hal.lock").write_bytes((green.folder / "hal.lock").read_bytes())
    return green, red


def use_as_base(report: Path, checkout: Checkout) -> None:
    """The report of main, where the workflow looks for it."""
    (checkout.folder / "base").mkdir()
    (checkout.folder / "base" / "audit.json").write_bytes(report.read_bytes())


def without_figures(comment: str) -> str:
    """What of a comment is the same on every machine: no times, shares, hashes or device."""
    text = re.sub(r"`[0-9a-f]{16}`", "`HASH`", comment)
    text = re.sub(r"(?<=` on ).*?(?=, plan)", "DEVICE", text)
    text = re.sub(r"[0-9][0-9,.]* (ns|µs|ms|s)\b", "TIME", text)
    return re.sub(r"<?[0-9][0-9,.]*%", "SHARE", text)


def main() -> None:
    """Writes the comment of the failing run anew."""
    with tempfile.TemporaryDirectory() as folder:
        green, red = green_and_red(Path(folder))
        audit, lock = steps()["audit"]["run"], steps()["lock"]["run"]
        assert green.run(audit) == 0, green.output
        use_as_base(green.folder / "audit.json", red)
        assert (red.run(audit), red.run(lock)) == (1, 1), red.output
        (EXAMPLE / "comment.md").write_text(red.comment(), encoding="utf-8")


if __name__ == "__main__":
    main()
