"""Compiles kernels for targets in processes of their own and collects the evidence."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from importlib import metadata

from hal_kernels.aot.compile_times import variant_name
from hal_kernels.aot.compiler_process import compiler_error, run_compiler
from hal_kernels.aot.evidence import Evidence, KernelEvidence
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TritonKernel

DEADLINE_S = 600.0  # of one process; a variant takes 1 to 15 s, on a busy machine a minute


def compile_kernel(
    kernel: TritonKernel,
    target: Target,
    *,
    only: str = "",
    seconds: MutableMapping[str, float] | None = None,
) -> KernelEvidence:
    """Every variant of a kernel on a target, or those of one configuration; a variant that kills
    the compiler is an error of its own. seconds: filled with how long each variant took that
    was not cached.

    Raises KernelSourceError for an exception of our own sources, KernelCompilerError where this
    machine failed: neither is evidence.
    """
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
    """The compiled variants with their seconds, and what the compiler died of ("" if it did not).

    The deadline ends what is under way, not the kernel: what is left is begun anew, unless not one
    variant was done in that time.
    """
    what = f"{kernel.name} for {target.arch}"
    arguments = (kernel.name, target.arch, only, str(first))
    run = run_compiler("hal_kernels.aot.compile_child", arguments, what=what, deadline_s=DEADLINE_S)
    lines = [json.loads(line) for line in run.lines]
    found = [(Evidence(**line["evidence"]), line["seconds"]) for line in lines]
    if run.is_late and not found:
        raise compiler_error(what, f"no variant was compiled within {DEADLINE_S:.0f} s")
    return found, run.refusal
