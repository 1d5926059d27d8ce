"""What would unlock a lost fast path, in the words of somebody who can do it."""

from __future__ import annotations

from collections.abc import Sequence

from hal.reasons import Reason, ReasonKind

_LEAD = {
    ReasonKind.SOFTWARE: "install",
    ReasonKind.MISSING: "write the kernel",
    ReasonKind.UNVERIFIED: "verify",
    ReasonKind.ARGUMENT: "extend the kernel",
    ReasonKind.POLICY: "change the policy",
    ReasonKind.SEMANTIC: "allow the change of meaning",
    ReasonKind.EXPLICIT: "drop the explicit choice",
}


def unlock_of(reason: Reason) -> str:
    """One step that would take the reason away; "" for what nobody can change (the hardware)."""
    lead = _LEAD.get(reason.kind)
    if lead is None:
        return ""
    if reason.kind is ReasonKind.MISSING and reason.what != "kernel":
        # A form of a kernel that is there: what it takes is no help, what it was asked for is.
        return f"{lead}: {reason.what} {reason.found} (it takes {reason.required})"
    if reason.kind in (ReasonKind.SOFTWARE, ReasonKind.MISSING):
        return f"{lead}: {reason.required}"
    return f"{lead}: {reason.what} {reason.required} (found {reason.found})"


def unlocks_of(reasons: Sequence[Reason]) -> tuple[str, ...]:
    """What to do for all of them, in their order, each once."""
    return tuple(dict.fromkeys(step for step in map(unlock_of, reasons) if step))
