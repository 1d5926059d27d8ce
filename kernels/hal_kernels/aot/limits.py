"""What stored evidence allows a candidate to say. Free of torch and triton."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hal.device import DeviceSpec
from hal.reasons import Reason, ReasonKind
from hal_kernels.aot.catalogue import CATALOGUE
from hal_kernels.aot.evidence import Evidence, EvidenceTier, read_evidence
from hal_kernels.aot.source_state import outdated
from hal_kernels.aot.triton_versions import REFERENCE, evidence_for

_NATIVE: tuple[EvidenceTier, ...] = ("native",)


@dataclass(frozen=True, slots=True)
class EvidenceQuery:
    """Which machine code the limits of a kernel's package asked about."""

    kernel: str
    dtype: str
    config: str


_ASKED: ContextVar[list[EvidenceQuery] | None] = ContextVar("asked", default=None)


def evidence_asked(
    limits: Callable[..., Sequence[Reason]], request: Any, device: DeviceSpec
) -> tuple[EvidenceQuery, ...]:
    """Which kernels in which variants a request ends in: those whose machine code its limits ask
    about. So the kernels that a plan shows are those that selection judged."""
    asked: list[EvidenceQuery] = []
    token = _ASKED.set(asked)
    try:
        limits(request, device)
    finally:
        _ASKED.reset(token)
    return tuple(dict.fromkeys(asked))


def not_written(kernel: str, what: str, required: str, found: str) -> Reason:
    """A form of the op that the kernel does not have yet."""
    return Reason(what=f"{kernel}: {what}", required=required, found=found, kind=ReasonKind.MISSING)


def evidence_of(kernel: str, device: DeviceSpec, dtype: str, config: str = "") -> Evidence | None:
    """The stored variant of a kernel on a device's architecture, the worst of the dtype where no
    configuration is named; of the Triton that is installed beside it where that version has
    evidence of its own."""
    stored = evidence_for(kernel, device.arch, device.software.get("triton", "")).evidence
    return None if stored is None else stored.find(dtype, config)


def evidence_caveat(kernel: str, device: DeviceSpec) -> str:
    """Why stored machine code need not be what runs: another Triton is installed, the source is
    another one, or the kernel stands for what a call does otherwise; "" where it is."""
    found = evidence_for(kernel, device.arch, device.software.get("triton", ""))
    old = "" if found.evidence is None else outdated(found.evidence)
    own = CATALOGUE[kernel].caveat if kernel in CATALOGUE else ""
    return "; ".join(filter(None, (found.caveat, old, own)))


def evidence_reasons(
    kernel: str,
    device: DeviceSpec,
    *,
    dtype: str,
    config: str = "",
    allowed: Collection[EvidenceTier] = _NATIVE,
) -> list[Reason]:
    """Why the compiled code does not allow the claim; empty if it does.

    config: the form that the request launches; "" for a kernel with one form of the dtype.
    An architecture that nothing was compiled for is UNVERIFIED, code that does not compile or ends
    in other instructions is HARDWARE, code that spills is a gap of the kernel. What another version
    of Triton compiles as claimed is SOFTWARE.
    """
    asked = _ASKED.get()
    if asked is not None:
        asked.append(EvidenceQuery(kernel, dtype, config))
    found = evidence_of(kernel, device, dtype, config)
    if found is None:
        return [
            Reason(
                what=f"machine code of {kernel}",
                required=f"compiled and read for {device.arch}",
                found="no evidence",
                kind=ReasonKind.UNVERIFIED,
            )
        ]
    reasons = []
    if not _bears_out(found, allowed):
        reasons.append(_not_as_claimed(kernel, device, found, dtype, config, allowed))
    most = device.attributes.get("shared_memory_per_block_bytes")
    if most is not None and found.shared_bytes > int(most):
        reasons.append(
            Reason(
                what=f"shared memory of {kernel}",
                required=f"at most {int(most):,} bytes a block",
                found=f"{found.shared_bytes:,}",
                kind=ReasonKind.ARGUMENT,
            )
        )
    return reasons


def _bears_out(found: Evidence, allowed: Collection[EvidenceTier]) -> bool:
    """Whether code is of an allowed tier, and of no registers that spill beside it: emulated code
    that spills is of two tiers at once, of which one is said."""
    return found.tier in allowed and (not found.spills or found.tier == "spilled")


def _not_as_claimed(
    kernel: str,
    device: DeviceSpec,
    found: Evidence,
    dtype: str,
    config: str,
    allowed: Collection[EvidenceTier],
) -> Reason:
    required = " or ".join(allowed) + (f" {dtype}" if dtype else "")
    spills_alone = found.tier in allowed or found.tier == "spilled"
    required += " and no spills" * (found.tier in allowed)
    stored = read_evidence(kernel, device.arch)
    reference = None if stored is None else stored.find(dtype, config)
    if reference is not None and _bears_out(reference, allowed):
        return Reason(
            what=f"machine code of {kernel}",
            required=f"triton {REFERENCE}, whose code is {required} "
            f"(pip install 'triton=={REFERENCE}.*')",
            found=f"{found.describe()} by triton {device.software['triton']}",
            kind=ReasonKind.SOFTWARE,
        )
    return Reason(
        what=f"machine code of {kernel}",
        required=required,
        found=found.describe(),
        kind=ReasonKind.ARGUMENT if spills_alone else ReasonKind.HARDWARE,
    )
