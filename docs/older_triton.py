"""What older versions of Triton make worse of the kernels, for docs/kernels.md."""

from __future__ import annotations

from collections import Counter

from hal_kernels.aot.evidence import stored_evidence
from hal_kernels.aot.triton_versions import REFERENCE, STORES, minor_version, reference_variant
from support import markdown

_Row = tuple[str, str, str, str]  # version, kernel, tier of the reference, tier


def differences() -> str:
    """A row per version, kernel and change of tier, with the variants by architecture."""
    rows: dict[_Row, Counter[str]] = {}
    spills: dict[_Row, list[int]] = {}
    compared: Counter[str] = Counter()
    for version, store in STORES.items():
        for kernel in stored_evidence(store) if version != REFERENCE else ():
            for variant in kernel.variants:
                reference = reference_variant(kernel, variant)
                if reference is None:
                    continue
                compared[minor_version(kernel.triton)] += 1
                if variant.tier != reference.tier:
                    row = (version, kernel.kernel, reference.tier, variant.tier)
                    rows.setdefault(row, Counter())[kernel.target] += 1
                    spills.setdefault(row, []).append(variant.spills)
    of = sum(len(kernel.variants) for kernel in stored_evidence())
    told = ", ".join(
        f"{number:,} of {of:,} variants by {version}" for version, number in compared.items()
    )
    lines = [
        [
            version,
            f"`{kernel}`",
            before,
            f"{after}{_registers(spills[version, kernel, before, after])}",
            ", ".join(f"`{target}` {number}" for target, number in sorted(counts.items())),
        ]
        for (version, kernel, before, after), counts in sorted(rows.items())
    ]
    table = markdown(["Triton", "Kernel", f"with {REFERENCE}", "with it", "Variants"], lines)
    return f"Compiled from today's sources and compared: {told}.\n\n{table}"


def _registers(spilled: list[int]) -> str:
    most, least = max(spilled), min(spilled)
    if not most:
        return ""
    return f" ({least} words)" if least == most else f" ({least} to {most} words)"
