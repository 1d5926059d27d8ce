"""The matrix of kernels and architectures for docs/kernels.md, from the stored machine code."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.evidence import Evidence, EvidenceTier, read_evidence
from hal_kernels.aot.explanations import explanations, find_explanation
from hal_kernels.aot.narrow_loads import find_narrow_load, is_narrow, narrow_loads
from hal_kernels.aot.occupancy import occupancy_limits
from hal_kernels.aot.targets import TARGETS
from hal_kernels.tuning.tunable_kernels import TUNABLE
from support import markdown

_LETTERS: dict[EvidenceTier, str] = {
    "native": "", "emulated": "e", "spilled": "s", "scalar": "c", "error": "x",
}  # fmt: skip
UNEXPLAINED = "?"


@functools.cache
def _cells() -> dict[tuple[str, str], dict[str, tuple[Evidence, ...]]]:
    """(kernel, claimed dtype, with FP8 as one) -> architecture -> its variants."""
    found: dict[tuple[str, str], dict[str, tuple[Evidence, ...]]] = {}
    for name in CATALOGUE:
        for target in TARGETS:
            stored = read_evidence(name, target.arch)
            for variant in stored.variants if stored else ():
                dtype = "fp8" if variant.dtype.startswith("fp8") else variant.dtype
                row = found.setdefault((name, dtype), {})
                row[target.arch] = (*row.get(target.arch, ()), variant)
    return found


def matrix() -> str:
    """A row per kernel and claimed dtype, a column per architecture."""
    columns = ["Kernel", "Dtype", *(f"`{target.arch}`" for target in TARGETS)]
    rows = [
        [f"`{name}`", dtype, *(_cell(name, found.get(target.arch, ())) for target in TARGETS)]
        for (name, dtype), found in _cells().items()
    ]
    return markdown(columns, rows)


def _cell(kernel: str, variants: Sequence[Evidence]) -> str:
    """`12` native variants, or as `8 **4e** [1]` how many are of which tier, with the reason's
    number; `4e, 2 spill` where the tier does not say that some spill; `(2 n1)` where two of all
    load less than 16 bytes at a time, with the number of that reason."""
    if not variants:
        return "–"
    parts = []
    for tier, letter in _LETTERS.items():
        of_tier = [variant for variant in variants if variant.tier == tier]
        if not of_tier:
            continue
        notes = sorted({_number(kernel, variant) for variant in of_tier} - {""})
        spilling = sum(variant.spills > 0 for variant in of_tier if tier != "spilled")
        text = f"{len(of_tier)}{letter}" + (f", {spilling} spill" if spilling else "")
        parts.append(f"**{text}** [{', '.join(notes)}]" if letter else text)
    return " ".join([*parts, *_narrow(kernel, variants)])


def _narrow(kernel: str, variants: Sequence[Evidence]) -> list[str]:
    narrow = [variant for variant in variants if is_narrow(variant)]
    if not narrow:
        return []
    found = [find_narrow_load(kernel, variant) for variant in narrow]
    notes = [f"n{n}" for n, reason in enumerate(narrow_loads(), 1) if reason in found]
    return [f"({len(narrow)} {', '.join([*notes, *([UNEXPLAINED] if None in found else [])])})"]


def _number(kernel: str, variant: Evidence) -> str:
    if variant.tier == "native":
        return ""
    reason = find_explanation(kernel, variant)
    return UNEXPLAINED if reason is None else str(explanations().index(reason) + 1)


def reasons() -> str:
    """The reasons of the cells that are not native, by their numbers."""
    lines = [
        f"{number}. {', '.join(f'`{name}`' for name in reason.kernels)} on "
        f"{', '.join(f'`{arch}`' for arch in reason.targets)}: {reason.tier} "
        f"({reason.cause}): {reason.text} ({reason.source})."
        for number, reason in enumerate(explanations(), 1)
    ]
    return "\n".join(lines)


def narrow_load_reasons() -> str:
    """The reasons of the variants that load less than 16 bytes at a time, by their numbers."""
    rows = [
        [
            f"n{number}",
            ", ".join(f"`{name}`" for name in reason.kernels),
            "" if reason.configs == ["*"] else ", ".join(f"`{name}`" for name in reason.configs),
            "all"
            if len(reason.targets) == len(TARGETS)
            else ", ".join(f"`{arch}`" for arch in reason.targets),
            ", ".join(str(width) for width in reason.widths),
            f"{reason.cause}: {reason.text}",
        ]
        for number, reason in enumerate(narrow_loads(), 1)
    ]
    return markdown(["", "Kernels", "Variants", "Architectures", "Bytes", "Reason"], rows)


def limits() -> str:
    """What a multiprocessor of each architecture holds, and who says so."""
    columns = [
        "Architecture",
        "Warps",
        "Blocks",
        "Registers",
        "in units of",
        "Shared KiB",
        "Source",
    ]
    rows = [
        [
            f"`{arch}`",
            f"{held.max_warps} of {held.warp_lanes}",
            str(held.max_blocks),
            f"{held.registers:,}",
            str(held.register_unit),
            f"{held.shared_bytes / 1024:.0f}",
            held.source,
        ]
        for arch, held in occupancy_limits().items()
    ]
    return markdown(columns, rows)


def tunable() -> str:
    """What `hal kernels tune` can choose for, and how a class of each is written."""
    rows = [
        [
            f"`{name}`",
            f"`{','.join(f'{size}=…' for size in kernel.size_names)},rows=…`",
            ", ".join(f"`{form}`" for form in kernel.forms),
        ]
        for name, kernel in TUNABLE.items()
    ]
    return markdown(["Kernel", "`--shape`", "`form=`"], rows)
