"""Compiles one configuration in a process of its own: a compiler may abort or never end."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hal_kernels.aot.compiler_process import run_compiler
from hal_kernels.aot.evidence import Evidence
from hal_kernels.aot.targets import Target
from hal_kernels.tuning.configuration_files import Trial
from hal_kernels.tuning.shapes import ShapeClass

DEADLINE_S = 180.0
_MAX_ERROR = 300


def compile_trial(
    kernel: str, target: Target, shape: ShapeClass, configuration: Mapping[str, int]
) -> Trial:
    """What the machine code of a configuration is; a compiler's refusal is a trial too.

    Raises KernelSourceError for an exception of our own sources, KernelCompilerError where this
    machine failed: neither says anything about the configuration, nor is it kept.
    """
    run = run_compiler(
        "hal_kernels.tuning.trial_child",
        (kernel, target.arch, str(shape), json.dumps(dict(configuration))),
        what=f"{kernel} for {target.arch}",
        deadline_s=DEADLINE_S,
    )
    if run.lines and not run.refusal:
        return trial_of(Evidence(**json.loads(run.lines[0])), configuration)
    why = run.refusal or f"no end after {DEADLINE_S:.0f} s"
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
