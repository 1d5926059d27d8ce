"""What is wrong with a plan: lost fast paths without a waiver, requests that nothing serves.

A plan is strict: it raises for any of these. A report on hardware that is not here shows them all
beside what would run, and then fails as well.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hal.errors import PlanError, SelectionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One call site and token range whose choice is not allowed, or has none.

    text: what is lost. waiver: the stanza that would allow it, "" where none can. unserved: the
    error of a request that no candidate may serve.
    """

    site: str
    label: str
    tokens: str
    text: str
    waiver: str = ""
    unserved: SelectionError | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "op": self.label,
            "tokens": self.tokens,
            "kind": "lost fast path" if self.unserved is None else "unserved",
            "text": self.text,
        }


# So many waivers are shown in an error; a file with all of them is what more is for.
_MOST_WAIVERS = 8
# So many lost paths are told in an error; a plan's own table tells them all, the dearest first.
_MOST_LINES = 12


def violation_error(device: str, violations: Sequence[Violation]) -> PlanError:
    """All of them as one error about `device`, with the waivers that would allow them."""
    allow = waiver_stanzas(violations)
    shown = "\n\n".join(allow[:_MOST_WAIVERS])
    if len(allow) > _MOST_WAIVERS:
        shown += (
            f"\n\n… and {len(allow) - _MOST_WAIVERS} more: "
            "`hal plan` with --waiver-template FILE writes them all"
        )
    lines = violation_lines(violations)
    told = lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        told.append(f"… and {len(lines) - _MOST_LINES} more: `hal plan` lists them all")
    return PlanError(
        f"plan for {device}",
        "the best tier known for this device at every call site",
        "lost fast paths:\n    - " + "\n    - ".join(told),
        "install or enable what the reasons name"
        + (f"; or allow it in the waiver file:\n{shown}" if shown else ""),
    )


def violation_lines(violations: Sequence[Violation]) -> list[str]:
    """One line for each text: sites that lost the same thing share it."""
    sites: dict[tuple[str, str, str], list[str]] = {}
    for v in violations:
        shared = sites.setdefault((v.label, v.tokens, v.text), [])
        if v.site not in shared:
            shared.append(v.site)
    return [
        f"{', '.join(names)} ({label}, {tokens} tokens): {text}"
        for (label, tokens, text), names in sites.items()
    ]


def waiver_stanzas(violations: Sequence[Violation]) -> list[str]:
    """The waivers that would allow them, each once, and none whose calls an earlier one allows: a
    waiver that is not needed would be an error of the file."""
    kept: list[tuple[str, dict[str, Any]]] = []
    for text in dict.fromkeys(v.waiver for v in violations if v.waiver):
        (stanza,) = tomllib.loads(text)["waiver"]
        if not any(_allows(earlier, stanza) for _, earlier in kept):
            kept.append((text, stanza))
    return [text for text, _ in kept]


def _allows(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the calls of `other` are all within `one`: a "*" of a component spans dots."""
    if any(one[key] != other[key] for key in ("op", "device", "kind")):
        return False
    return fnmatchcase(str(other["component"]), str(one["component"]))
