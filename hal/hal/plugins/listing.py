"""List the plug-ins that installed distributions offer, without importing any of them."""

import importlib.metadata
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from hal.hookspecs import ENTRY_POINT_GROUP

_ENTRY_POINTS_FILE = "entry_points.txt"


@dataclass(frozen=True, slots=True, order=True)
class PluginEntry:
    """One entry point of the group `hal.backends`, as its distribution declares it.

    Entries sort by (distribution, name), which is the order everything is done in.

    Attributes:
        distribution: the distribution's normalised name.
        name: the entry point's name.
        value: what it points to, `package.module` or `package.module:attribute`.
        version: the distribution's version.
        location: the folder the distribution was found in.
        shadowed_by: the earlier copy of the same distribution that hides this one.
        problem: why the entry cannot be used at all; empty if it can.
    """

    distribution: str
    name: str
    value: str
    version: str
    location: str = ""
    shadowed_by: str = ""
    problem: str = ""

    @property
    def key(self) -> str:
        """The name that is unique over all distributions."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return f"plug-in {self.name!r} of {self.distribution} {self.version}"


def list_plugins(search_path: Iterable[str] | None = None) -> tuple[PluginEntry, ...]:
    """Every plug-in on `search_path` (default `sys.path`), sorted; none of them is imported.

    A distribution that is on the path twice is listed twice, the later copy as shadowed.
    """
    return list_entries(ENTRY_POINT_GROUP, search_path)


def list_entries(group: str, search_path: Iterable[str] | None = None) -> tuple[PluginEntry, ...]:
    """The same for any group of entry points.

    `importlib.metadata.entry_points` would raise for one malformed file of one distribution, and
    so hide all others; here that distribution gets an entry with its `problem`.
    """
    path = list(sys.path if search_path is None else search_path)
    position = {folder: index for index, folder in reversed(list(enumerate(path)))}
    found: list[tuple[int, PluginEntry]] = []
    for distribution in importlib.metadata.distributions(path=path):
        for entry in _entries_of(distribution, group):
            found.append((position.get(entry.location, len(path)), entry))
    return _with_shadows(found)


def _entries_of(distribution: importlib.metadata.Distribution, group: str) -> list[PluginEntry]:
    try:
        text = distribution.read_text(_ENTRY_POINTS_FILE)
    except (OSError, UnicodeDecodeError) as error:
        return [_blank(distribution, f"{_ENTRY_POINTS_FILE} is unreadable: {error}")]
    if text is None or f"[{group}]" not in text:
        return []
    # Only now is the metadata parsed: it is the slow part, and most distributions end above.
    blank = _blank(distribution)
    try:
        points = [point for point in distribution.entry_points if point.group == group]
    except (ValueError, TypeError, AttributeError) as error:
        return [replace(blank, problem=f"{_ENTRY_POINTS_FILE} is malformed: {error}")]
    return [_entry(blank, point) for point in points]


def _blank(distribution: importlib.metadata.Distribution, problem: str = "") -> PluginEntry:
    location = str(Path(str(distribution.locate_file(""))))
    try:
        metadata = distribution.metadata
        name, version = metadata["Name"], metadata["Version"]
    except (
        OSError,
        UnicodeDecodeError,
        KeyError,
        importlib.metadata.PackageNotFoundError,
    ) as error:
        name, version = None, None
        problem = problem or f"its METADATA is unreadable: {error}"
    return PluginEntry(
        distribution=canonicalize_name(str(name)) if name else "(unnamed)",
        name="(unreadable)",
        value="",
        version=str(version or "(unknown)"),
        location=location,
        problem=problem,
    )


def _entry(blank: PluginEntry, point: importlib.metadata.EntryPoint) -> PluginEntry:
    try:
        module = point.module
    except AttributeError:
        module = ""
    parts = module.split(".")
    problem = blank.problem
    if not all(part.isidentifier() for part in parts):
        problem = f"the value {point.value!r} is not `package.module` or `package.module:attribute`"
    return replace(blank, name=point.name, value=point.value, problem=problem)


def _with_shadows(found: list[tuple[int, PluginEntry]]) -> tuple[PluginEntry, ...]:
    winners: dict[str, PluginEntry] = {}
    entries: list[PluginEntry] = []
    for _, entry in sorted(found):
        winner = winners.setdefault(entry.key, entry)
        if winner is entry:
            entries.append(entry)
        elif winner != entry:
            hidden_by = f"{winner.distribution} {winner.version} in {winner.location}"
            entries.append(replace(entry, shadowed_by=hidden_by))
    return tuple(sorted(entries))
