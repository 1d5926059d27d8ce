"""The compiled kernels that a planned call ends in: what their machine code proves, and what their
configuration rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.answers import kernel_uses_of
from hal.candidates import KernelUse
from hal.ops.request import TokenRange

if TYPE_CHECKING:
    from hal.plan import PlannedOp

BASES = ("measured", "modelled", "default", "fixed")


def planned_uses(op: PlannedOp) -> tuple[KernelUse, ...]:
    """Of the chosen implementation at the fewest and the most tokens of the range, each once.

    Raises SelectionError if the candidate cannot say.
    """
    ends = dict.fromkeys((op.tokens.low, op.tokens.high))
    found = [
        use
        for tokens in ends
        for use in kernel_uses_of(
            op.choice, op.site.request.with_tokens(TokenRange(tokens, tokens))
        )
    ]
    return tuple(dict.fromkeys(found))


def deciding(document: Sequence[Any]) -> list[dict[str, Any]]:
    """Of the uses in a plan's JSON, what decides which code runs: configurations that were chosen
    for this device. A default is part of the kernel, and what is known of it decides nothing."""
    return [
        {key: use[key] for key in ("kernel", "shape", "configuration")}
        for use in document
        if use["basis"] in ("measured", "modelled")
    ]
