"""Calls that a user leaves outside bound ops, by name: each pattern has to be needed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from hal.dispatch_spy import EscapedCall
from hal.errors import RoutingError


class Allowances:
    """Globs over an op ("aten::convolution") or over the end of its place ("modeling_x.py:12")."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._used: set[str] = set()

    def covers(self, call: EscapedCall) -> bool:
        """Whether a pattern names the call; it counts as used."""
        for pattern in self._patterns:
            if fnmatchcase(call.op, pattern) or fnmatchcase(call.location, f"*{pattern}"):
                self._used.add(pattern)
                return True
        return False

    def check_used(self) -> None:
        """Raises RoutingError for a pattern that nothing needs."""
        unused = [pattern for pattern in self._patterns if pattern not in self._used]
        if unused:
            raise RoutingError(
                f"allow={unused[0]!r}",
                "a call outside bound ops that it names",
                "none in the rehearsal",
                "remove it",
            )
