"""Compiles one configuration in a process of its own: a compiler may abort or never end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from hal.processes import ProcessEnd, run_bounded
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.targets import Target
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.shapes import ShapeClass

DEADLINE_S = 180.0
_MAX_ERROR = 300


def compile_trial(
    kernel: str, target: Target, shape: ShapeClass, configuration: Mapping[str, int]
) -> Trial:
    """What the machine code of a configuration is; a compiler's refusal is a trial too."""
    outcome = run_bounded(
        [
            sys.executable,
            "-m",
            "hal_kernels.tuning.trial_child",
            kernel,
            target.arch,
            str(shape),
            json.dumps(dict(configuration)),
            "{result_fd}",
        ],
        deadline_s=DEADLINE_S,
        environment={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "TRITON_DEFAULT_FP_FUSION": "1",
        },
        result_limit_bytes=1 << 20,
        is_contained=True,
    )
    lines = outcome.result.splitlines()
    if outcome.end is ProcessEnd.EXITED and outcome.exit_code == 0 and lines:
        return trial_of(Evidence(**json.loads(lines[0])), configuration)
    tail = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:]
    why = f"the compiler ended: {outcome.describe()} {' '.join(tail)}".strip()
    return Trial(configuration=dict(configuration), tier="error", error=why[:_MAX_ERROR])


def trial_of(found: Evidence, configuration: Mapping[str, int]) -> Trial:
    """The part of the evidence that decides about a configuration."""
    return Trial(
        configuration=dict(configuration),
        tier=found.tier,
        instruction=found.instruction,
        instruction_count=found.instruction_count,
        registers=found.registers,
        spills=found.spills,
        shared_bytes=found.shared_bytes,
        error=found.error[:_MAX_ERROR],
    )
