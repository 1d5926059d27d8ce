"""Why ours has something worse than a peer, where that is no matter of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

# (problem, target, metric) -> why; the first that fits. Patterns as in a shell.
_WHY: tuple[tuple[str, str, str, str], ...] = ()


def explanation(problem: str, target: str, worse: Mapping[str, str]) -> str:
    """Why the metrics are worse; "" where nothing is, or nothing is known of it."""
    found = []
    for metric in worse:
        for of, on, about, why in _WHY:
            if fnmatchcase(problem, of) and fnmatchcase(target, on) and about == metric:
                found.append(why)
                break
    return " ".join(dict.fromkeys(found))
