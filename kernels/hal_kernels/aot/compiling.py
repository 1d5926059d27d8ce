"""Compiles kernels for targets in processes of their own and collects the evidence."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from importlib import metadata

from hal.errors import KernelSourceError
from hal.processes import ProcessEnd, run_bounded
from hal_kernels.aot.compile_times import variant_name
from hal_kernels.aot.evidence import Evidence, KernelEvidence
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TritonKernel

_TRACEBACK = "Traceback (most recent call last)"
DEADLINE_S = 600.0  # of one kernel on one target; a variant takes 1 to 15 s


def compile_kernel(
    kernel: TritonKernel,
    target: Target,
    *,
    only: str = "",
    seconds: MutableMapping[str, float] | None = None,
) -> KernelEvidence:
    """Every variant of a kernel on a target, or those of one configuration; a variant that kills
    the compiler is an error of its own. seconds: filled with how long each variant took that
    was not cached."""
    variants = [v for v in kernel.variants(target) if only in ("", v.config)]
    found: list[Evidence] = []
    while len(found) < len(variants):
        done, problem = _run_child(kernel, target, only, len(found))
        found += [variant for variant, _ in done]
        if seconds is not None:
            seconds.update(
                (variant_name(v.dtype, v.config), taken) for v, taken in done if taken is not None
            )
        if problem and len(found) < len(variants):
            variant = variants[len(found)]
            found.append(
                Evidence(
                    target=target.arch,
                    dtype=variant.dtype,
                    config=variant.config,
                    tier="error",
                    error=problem,
                )
            )
    return KernelEvidence(
        kernel=kernel.name,
        op=kernel.op,
        target=target.arch,
        source_hash=kernel.source_hash(target),
        triton=metadata.version("triton"),
        variants=tuple(found),
    )


def _run_child(
    kernel: TritonKernel, target: Target, only: str, first: int
) -> tuple[list[tuple[Evidence, float | None]], str]:
    """The compiled variants with their seconds, and what ended it early ("" if nothing did)."""
    outcome = run_bounded(
        [
            sys.executable,
            "-m",
            "hal_kernels.aot.compile_child",
            kernel.name,
            target.arch,
            only,
            str(first),
            "{result_fd}",
        ],
        deadline_s=DEADLINE_S,
        # The interpreter's flag would compile nothing; the rounding of products is stated.
        environment={
            **{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
            "TRITON_DEFAULT_FP_FUSION": "1",
        },
        result_limit_bytes=1 << 20,
        is_contained=True,
    )
    lines = [json.loads(line) for line in outcome.result.splitlines()]
    found = [(Evidence(**line["evidence"]), line["seconds"]) for line in lines]
    is_whole = outcome.end is ProcessEnd.EXITED and outcome.exit_code == 0
    if is_whole:
        return found, ""
    stderr = outcome.stderr.decode(errors="replace").strip()
    tail = stderr.splitlines()[-1:]
    # A compiler's refusal is evidence and came as a result; an exception of ours is of the sources,
    # and stored as evidence it would look like a target that takes no such kernel.
    if outcome.end is ProcessEnd.EXITED and _TRACEBACK in stderr:
        raise KernelSourceError(
            f"compiling {kernel.name} for {target.arch}",
            "kernels and their declarations that can be imported and read",
            "".join(tail)[:300],
            "correct the error; nothing was stored of this kernel",
        )
    return found, f"the compiler ended: {outcome.describe()} {' '.join(tail)}".strip()[:300]
