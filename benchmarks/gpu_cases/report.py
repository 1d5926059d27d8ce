"""What a run says of each case, and the document that is kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from gpu_cases.case import Bench
from gpu_cases.running import Outcome
from gpu_cases.timing import Rates


def line(outcome: Outcome) -> str:
    """One line of one case."""
    if outcome.failure:
        return f"FAILED  {outcome.name}: {outcome.failure}"
    verdict = "right" if outcome.is_right else "WRONG"
    text = f"{verdict}  error {outcome.error:.1e}  {outcome.name}"
    if outcome.ours_us is not None:
        text += f"  {outcome.ours_us:.1f} us"
    if outcome.roofline_us is not None and outcome.ours_us:
        text += f", {outcome.roofline_us / outcome.ours_us:.0%} of the roofline"
    if outcome.ratio is not None:
        text += f", {outcome.library} {outcome.theirs_us:.1f} us, ratio {outcome.ratio:.2f}"
    if outcome.library_failure:
        text += f", {outcome.library} did not run"
    return text + ("  (goal missed)" if outcome.goal == "missed" else "")


def document(
    bench: Bench,
    rates: Rates | None,
    outcomes: Sequence[Outcome],
    *,
    not_run: Sequence[str],
    took_s: float,
    seed: int,
) -> dict[str, Any]:
    """Everything that was found, with where and when. not_run: cases that the time ended before.
    seed: of every case's random inputs."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": bench.spec.name,
        "arch": bench.spec.arch,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "measured_rates": None if rates is None else asdict(rates),
        "seed": seed,
        "took_s": round(took_s, 1),
        "not_run": list(not_run),
        "cases": [asdict(outcome) for outcome in outcomes],
    }


def write(path: Path, what: dict[str, Any]) -> None:
    """Whole or not at all: a run that is ended while it writes leaves what it wrote before."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
