"""Presets: configurations of published models that come with halstack, each value with its source.

A preset has no weights: it can be planned, not run.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

PRESETS_FOLDER = Path(__file__).resolve().parent / "presets"
SOURCES_FILE = PRESETS_FOLDER / "sources.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Where the values of some keys come from. keys: names, or "*" for every other key."""

    keys: tuple[str, ...]
    source: str
    confidence: str

    def names(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One preset. parameters: as its makers publish the number. is_unverified: nobody of this
    project has read the released configuration."""

    name: str
    title: str
    repository: str
    parameters: str
    sources: tuple[ValueSource, ...]
    is_unverified: bool = False
    note: str = ""

    @property
    def path(self) -> Path:
        return PRESETS_FOLDER / f"{self.name}.json"

    def source_of(self, key: str) -> ValueSource:
        """The source that names the key, else the one for all others."""
        own = [source for source in self.sources if key in source.keys]
        return (own or [source for source in self.sources if source.names(key)])[0]

    def values(self) -> dict[str, Any]:
        """Its configuration as it stands in the file."""
        values: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        return values


@cache
def load_presets() -> dict[str, Preset]:
    """All presets by name."""
    document: dict[str, Any] = tomllib.loads(SOURCES_FILE.read_text(encoding="utf-8"))
    return {
        name: Preset(
            name=name,
            title=table["title"],
            repository=table["repository"],
            parameters=table["parameters"],
            sources=tuple(
                ValueSource(
                    keys=tuple(entry["keys"]), source=entry["from"], confidence=entry["confidence"]
                )
                for entry in table["source"]
            ),
            is_unverified=table.get("unverified", False),
            note=table.get("note", ""),
        )
        for name, table in document.items()
    }


def preset_of(path: Path | str) -> Preset | None:
    """The preset whose file this is, None for any other model."""
    path = Path(path)
    preset = load_presets().get(path.stem) if path.suffix == ".json" else None
    return preset if preset is not None and path.resolve() == preset.path else None
