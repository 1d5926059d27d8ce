"""The table of others' variables (`foreign_variables.toml`), read: whose each is, what it does, and
which values make things slow."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

_OFF_WORDS = ("", "0", "false", "off", "no", "n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignVariable:
    """A variable or, with "*", a family of them.

    changes_decision: another kernel, backend, algorithm, device or number format comes of it. slow:
    "" for never, "on", "off", "few-threads", or words. slow_with: words that are slow on a CPU with
    that flag. devices: torch's types of the devices that
    it concerns, () for all. source: where its owner says so. is_ignored: of a family, but deciding
    nothing.
    """

    name: str
    owner: str
    effect: str
    source: str
    changes_decision: bool = False
    slow: str | tuple[str, ...] = ""
    slow_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_ignored: bool = False
    devices: tuple[str, ...] = ()

    def concerns(self, device_type: str) -> bool:
        """Whether a device of that type has anything to do with it."""
        return not self.devices or device_type in self.devices

    def is_slow(self, value: str) -> bool:
        """Whether that value makes things slow."""
        word = value.strip().lower()
        if self.slow == "on":
            return word not in _OFF_WORDS
        if self.slow == "off":
            return bool(word) and word in _OFF_WORDS
        if self.slow == "few-threads":
            return _too_few_threads(word)
        parts = {word, *(part.strip() for part in word.split(","))}
        words = set(self.slow)
        for flag, further in self.slow_with.items():
            words |= set(further) if flag in _cpu_flags() else set()
        return bool(parts & words)


def _too_few_threads(value: str) -> bool:
    """One thread beside several CPUs that this process may use, or less than half of them: of two
    logical CPUs one core is made, so that half may be all that there is."""
    try:
        count = int(value.split(",")[0])
    except ValueError:
        return False
    cpus = len(os.sched_getaffinity(0))
    return 0 < count < cpus and (count == 1 or 2 * count < cpus)


@cache
def _cpu_flags() -> frozenset[str]:
    """What Linux says of the CPU; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


@cache
def foreign_variable_table() -> tuple[ForeignVariable, ...]:
    """All entries in the order of the file."""
    text = resources.files("hal.auditing").joinpath("foreign_variables.toml").read_text("utf-8")
    return tuple(_entry(name, fields) for name, fields in tomllib.loads(text).items())


def _entry(name: str, fields: dict[str, Any]) -> ForeignVariable:
    slow = fields.get("slow", "")
    return ForeignVariable(
        name=name,
        owner=fields.get("owner", ""),
        effect=fields.get("effect", ""),
        source=fields.get("source", ""),
        is_ignored=fields.get("ignored", False),
        changes_decision=fields.get("decides", False),
        slow=slow if isinstance(slow, str) else tuple(slow),
        slow_with={flag: tuple(words) for flag, words in fields.get("slow_with", {}).items()},
        devices=tuple(fields.get("devices", ())),
    )
