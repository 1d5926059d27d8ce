"""Stored evidence as tables that fit a narrow terminal: an overview, and every variant of some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hal.cli.output import print_table, print_text
from hal_kernels.aot.compile_times import load_compile_times, variant_name
from hal_kernels.aot.evidence import (
    STORE,
    Evidence,
    KernelEvidence,
    read_evidence,
    short_instruction,
)
from hal_kernels.aot.explanations import explain
from hal_kernels.aot.narrow_loads import explain_narrow_load
from hal_kernels.aot.occupancy import occupancy_of_evidence
from hal_kernels.aot.source_state import outdated
from hal_kernels.aot.targets import Target
from hal_kernels.aot.triton_versions import reference_variant
from hal_kernels.aot.variant import TritonKernel

_COLUMNS = ("variant", "tier", "instruction", "regs", "spills", "KiB", "load", "warps", "s")


def stored(
    kernels: Sequence[TritonKernel], targets: Sequence[Target], store: Path = STORE
) -> Iterator[KernelEvidence]:
    """The evidence that there is, kernel by kernel."""
    for kernel in kernels:
        for target in targets:
            found = read_evidence(kernel.name, target.arch, store)
            if found is not None:
                yield found


def summary(found: KernelEvidence) -> str:
    """How many variants are of which tier, and how many spill where their tier does not say so."""
    tiers = [variant.tier for variant in found.variants]
    parts = [f"{tiers.count(tier)} {tier}" for tier in dict.fromkeys(tiers)]
    return ", ".join([*parts, *_spilling(found)])


def too_large(found: KernelEvidence) -> list[str]:
    """Variants of which no multiprocessor holds a block, with what is too much of them."""
    lines = []
    for variant in found.variants:
        held = occupancy_of_evidence(variant)
        if held is not None and not held.blocks:
            name = f"{variant.dtype} {variant.config}".strip()
            lines.append(
                f"{name}: no block fits, by {held.limited_by}: {variant.shared_bytes / 1024:.0f} "
                f"KiB shared, {variant.registers} registers of {variant.num_warps} warps"
            )
    return lines


def _spilling(found: KernelEvidence) -> list[str]:
    spilling = sum(variant.spills > 0 and variant.tier != "spilled" for variant in found.variants)
    return [f"{spilling} of them spill"] if spilling else []


def print_overview(
    kernels: Sequence[TritonKernel], targets: Sequence[Target], store: Path = STORE
) -> None:
    """A row per kernel: the targets on which every variant is of one tier, then the others."""
    rows = []
    for kernel in kernels:
        archs: dict[str, list[str]] = {}
        old = []
        for found in stored([kernel], targets, store):
            if outdated(found):
                old.append(found.target)
            tiers = {variant.tier for variant in found.variants}
            whole = [f"all {tiers.pop()}", *_spilling(found)] if len(tiers) == 1 else []
            text = ", ".join(whole) or summary(found)
            archs.setdefault(text, []).append(found.target)
        sorted_archs = sorted(archs.items(), key=lambda item: not item[0].startswith("all"))
        told = "; ".join(f"{text}: {' '.join(names)}" for text, names in sorted_archs)
        if len(archs) == 1:
            ((text, names),) = sorted_archs
            told = f"{text} on {'all' if len(names) == len(targets) else ''} {len(names)} targets"
        if old:
            where = "" if len(old) == len(targets) else f" ({' '.join(old)})"
            told += f"; the source is another one now{where}"
        rows.append((kernel.name, " ".join(told.split()) or "no evidence"))
    print_table(("kernel", "what its machine code proves"), rows, whole=("kernel",))
    print_text(
        "`hal kernels list --kernel NAME --target ARCH` shows each variant; --json all of them."
    )


def print_evidence(
    kernels: Sequence[TritonKernel], targets: Sequence[Target], store: Path = STORE
) -> None:
    """A table per kernel and target, a row per variant, then why some are not native or load less
    than 16 bytes at a time. load: bytes of the widest; warps: resident on a multiprocessor, with
    their share of the most that it holds; s: seconds that it took to compile on this machine.
    Where there is no evidence it says why."""
    for kernel in kernels:
        for target in targets:
            if not kernel.variants(target):
                print_text(f"{kernel.name} on {target.arch}: not meant for this architecture")
            elif read_evidence(kernel.name, target.arch, store) is None:
                named = f"hal kernels check --kernel {kernel.name} --target {target.arch} --update"
                print_text(f"{kernel.name} on {target.arch}: no evidence is stored ({named})")
    for found in stored(kernels, targets, store):
        seconds = load_compile_times(
            found.kernel, found.target, source=found.source_hash, triton=found.triton
        )
        rows = [
            (
                f"{variant.dtype} {variant.config}".strip(),
                variant.tier,
                _instruction(variant),
                str(variant.registers or ""),
                str(variant.spills),
                f"{variant.shared_bytes / 1024:.0f}",
                str(variant.widest_load_bytes or ""),
                _occupancy(variant),
                _seconds(seconds.get(variant_name(variant.dtype, variant.config))),
            )
            for variant in found.variants
        ]
        print_table(
            _COLUMNS,
            rows,
            title=f"{found.kernel} on {found.target}",
            whole=("tier", "regs", "spills", "KiB", "load", "warps", "s"),
        )
        for line in (outdated(found), *reasons(found)):
            if line:
                print_text(line)


def reasons(found: KernelEvidence) -> list[str]:
    """Why variants are not native, load less than 16 bytes at a time, or fit no multiprocessor,
    each reason once."""
    lines: dict[str, None] = dict.fromkeys(too_large(found))
    for variant in found.variants:
        reference = reference_variant(found, variant)
        for text in (
            explain(found.kernel, variant, reference),
            explain_narrow_load(found.kernel, variant, reference),
        ):
            if text is not None:
                lines[text] = None
    return list(lines)


def _occupancy(variant: Evidence) -> str:
    held = occupancy_of_evidence(variant)
    return "" if held is None else f"{held.warps} {held.share:.0%}"


def _seconds(taken: float | None) -> str:
    return "" if taken is None else f"{taken:.1f}"


def _instruction(variant: Evidence) -> str:
    if variant.error:
        return variant.error
    if not variant.instruction:
        return ""
    return f"{variant.instruction_count}× {short_instruction(variant.instruction)}"
