"""`hal kernels check` of one kernel on one target: compiles, compares with what is stored."""

from __future__ import annotations

import os
from pathlib import Path

from hal.cli.output import print_text
from hal.errors import PlanError, SettingsError
from hal_kernels.aot.compile_times import CompileTimes, load_compile_times, save_compile_times
from hal_kernels.aot.evidence import (
    Evidence,
    KernelEvidence,
    evidence_path,
    read_evidence,
    write_evidence,
)
from hal_kernels.aot.evidence_tables import reasons, summary, too_large
from hal_kernels.aot.targets import Target
from hal_kernels.aot.variant import TritonKernel


def check_kernel(
    kernel: TritonKernel, target: Target, store: Path, *, update: bool, changed: bool
) -> str:
    """What differs from what is stored, and which variants no multiprocessor can hold, with the
    kernel and the target; "" if there is nothing of either. What was stored now does not differ.

    update: store what was found, in place of a damaged file too. changed: only if the source did.
    Raises PlanError for a damaged file (without update) and for a folder that cannot be written,
    and what `compile_kernel` raises.
    """
    from hal_kernels.aot.compiling import compile_kernel

    if not kernel.variants(target):
        print_text(f"{kernel.name} {target.arch}: not meant for this architecture")
        return ""
    if update:
        _require_writable(evidence_path(kernel.name, target.arch, store))
    stored = _stored(kernel, target, store, is_remade=update)
    if changed and stored is not None and stored.source_hash == kernel.source_hash(target):
        return ""
    seconds: dict[str, float] = {}
    found = compile_kernel(kernel, target, seconds=seconds)
    print_text(f"{kernel.name} {target.arch}: {summary(found)}")
    for line in reasons(found):
        print_text(f"  {line}")
    _keep_times(found, seconds)
    problems = too_large(found)
    if update:
        write_evidence(found, store)
    elif difference := differences(stored, found):
        print_text(f"  differs: {difference}")
        problems.append(difference)
    return f"{kernel.name} on {target.arch}: {'; '.join(problems)}" if problems else ""


def _stored(
    kernel: TritonKernel, target: Target, store: Path, *, is_remade: bool
) -> KernelEvidence | None:
    try:
        return read_evidence(kernel.name, target.arch, store)
    except PlanError as error:
        if not is_remade:
            raise
        print_text(f"{kernel.name} {target.arch}: what is stored is replaced: {error.found}")
        return None


def _require_writable(path: Path) -> None:
    """Before minutes of compilation: can the result be stored?"""
    if path.exists() and not path.is_file():
        raise PlanError(
            f"evidence {path.name} of {path.parent.name}",
            "a file, or none",
            f"{path} is something else",
            "move it away",
        )
    nearest = path if path.exists() else path.parent
    while not nearest.exists():
        nearest = nearest.parent
    # A file is replaced through its folder, in which another is made and renamed.
    folder = nearest if nearest.is_dir() else nearest.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(
            f"evidence {path.name} of {path.parent.name}",
            "a folder that can be written",
            f"{folder} cannot be",
            "check without --update, or update where the sources are your own: pip install -e",
        )


def _keep_times(found: KernelEvidence, seconds: dict[str, float]) -> None:
    """How long it took is no part of the evidence: where it cannot be kept, that is said."""
    if not seconds:
        return
    try:
        kept = load_compile_times(
            found.kernel, found.target, source=found.source_hash, triton=found.triton
        )
        times = CompileTimes(
            source=found.source_hash, triton=found.triton, seconds={**kept, **seconds}
        )
        save_compile_times(found.kernel, found.target, times)
    except SettingsError as error:
        print_text(f"  compile times are not kept: {error.one_line()}")


def differences(stored: KernelEvidence | None, found: KernelEvidence) -> str:
    """What decides and differs. Registers and code size may differ between corrected releases
    of a compiler; tiers, what limits ask about and what explanations rest on may not."""
    if stored is None:
        return "nothing is stored"
    if stored.source_hash != found.source_hash:
        return f"source {stored.source_hash}, now {found.source_hash}"
    before = {(v.dtype, v.config): v for v in stored.variants}
    after = {(v.dtype, v.config): v for v in found.variants}
    if before.keys() != after.keys():
        return f"variants {sorted(before)}, now {sorted(after)}"
    changed = [
        f"{dtype} {config}: {before[dtype, config].describe()}, now {variant.describe()}"
        for (dtype, config), variant in after.items()
        if _deciding(variant) != _deciding(before[dtype, config])
    ]
    return "; ".join(changed)


def _deciding(variant: Evidence) -> tuple[object, ...]:
    return (
        variant.tier,
        variant.instruction,
        variant.spills > 0,
        bool(variant.error),
        variant.shared_bytes,
        variant.num_warps,
        variant.widest_load_bytes,
    )
