"""Which stored machine code speaks for the Triton that is installed.

Each minor version that the kernels are kept valid for has evidence of its own: another compiler
may spill where this one does not. What another version would make of them nobody looked at, and
whoever reads the evidence is told. Free of torch and triton.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hal.errors import UsageError
from hal_kernels.aot.evidence import STORE, Evidence, KernelEvidence, read_evidence

REFERENCE = "3.9"
"""The minor version that the project develops with."""

STORES: Mapping[str, Path] = MappingProxyType(
    {REFERENCE: STORE, "3.6": STORE.with_name("evidence_triton_3_6")}
)
"""Minor version -> where its evidence is kept."""


# A version of PEP 440, of which the first two numbers are wanted. Written out here: the kernels
# need no `packaging`, and run where it is not installed.
_VERSION = re.compile(
    r"\s*v?(?:\d+!)?(?P<major>\d+)(?:\.(?P<minor>\d+))?(?:\.\d+)*"
    r"(?:[-_.]?(?:alpha|a|beta|b|preview|pre|c|rc)[-_.]?\d*)?"
    r"(?:-\d+|[-_.]?(?:post|rev|r)[-_.]?\d*)?(?:[-_.]?dev[-_.]?\d*)?"
    r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?\s*",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEvidence:
    """evidence: None if nothing was compiled. caveat: why it need not hold for the Triton that is
    installed; "" if it is that version's, or if no version is known."""

    evidence: KernelEvidence | None
    caveat: str = ""


def minor_version(version: str) -> str:
    """ "3.6" of "3.6.0+git1a2b"; "" of what is no version."""
    found = _VERSION.fullmatch(version)
    return f"{int(found['major'])}.{int(found['minor'] or 0)}" if found else ""


def store_of(version: str) -> Path:
    """Where evidence of a compiler is kept.

    Raises UsageError for a version that none is kept of: stored as another's it would be untrue.
    """
    minor = minor_version(version)
    if minor not in STORES:
        raise UsageError(
            "evidence of the kernels",
            f"a Triton that evidence is kept of: {', '.join(STORES)}",
            version or "no version",
            f"pip install 'triton=={REFERENCE}.*'",
        )
    return STORES[minor]


def evidence_for(kernel: str, arch: str, installed: str = "") -> FoundEvidence:
    """The evidence of a kernel on an architecture that says most about a version of Triton.

    installed: as the distribution states it; "" where none is known, which is the reference
    version's. Evidence of another version is taken only while it is of the same source as the
    reference's. Raises PlanError for a damaged file.
    """
    reference = read_evidence(kernel, arch)
    if reference is None or not installed or minor_version(installed) == REFERENCE:
        return FoundEvidence(evidence=reference)
    store = STORES.get(minor_version(installed))
    own = None if store is None else read_evidence(kernel, arch, store)
    if own is not None and own.source_hash == reference.source_hash:
        return FoundEvidence(evidence=own)
    was = "" if own is None else f", whose evidence is of an older source of {kernel}"
    return FoundEvidence(
        evidence=reference,
        caveat=f"made by triton {reference.triton}; {installed} is installed{was}",
    )


def reference_variant(found: KernelEvidence, variant: Evidence) -> Evidence | None:
    """What the reference version makes of a variant that another one compiled from the same source;
    None for evidence of the reference version itself."""
    if minor_version(found.triton) == REFERENCE:
        return None
    reference = read_evidence(found.kernel, found.target)
    if reference is None or reference.source_hash != found.source_hash:
        return None
    return reference.find(variant.dtype, variant.config)
