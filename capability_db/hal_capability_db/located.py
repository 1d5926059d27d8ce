"""Reads one YAML (or JSON) file of the database into plain values that know their lines.

A file is data, not a program: no aliases, anchors, tags, merge keys or second documents, and
bounds on size, depth and number of values, so that a hostile file costs bounded time and memory.
Only `null`, `true`, `false` and decimal numbers are anything but text: `no` and `0x10de` stay text.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hal_capability_db.errors import DatabaseError

MAX_FILE_BYTES = 4 << 20
MAX_DEPTH = 24
MAX_VALUES = 200_000
_MAX_NUMBER_CHARACTERS = 32
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?\Z")
_CONSTANTS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True}
_CONSTANTS |= {"false": False}


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file; lines count from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class LocatedMap(dict[str, Any]):
    """A mapping of a file, with the place of itself and of each of its keys."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.places: dict[str, Place] = {}


class LocatedList(list[Any]):
    """A list of a file, with the place of itself and of each of its items."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.places: list[Place] = []


Container: TypeAlias = LocatedMap | LocatedList


def refusal(place: object, key: str, required: str, found: str, remedy: str) -> DatabaseError:
    """The error of a file: `place` is a `Place`, or the file if no line is to blame."""
    who = f"{place}, {key}" if key else str(place)
    return DatabaseError(who, required, found, remedy)


def read_text(path: Path) -> str:
    """The text of a regular file of at most `MAX_FILE_BYTES`, UTF-8.

    Raises:
        DatabaseError: it is no such file; with the line for a wrong byte.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "neither a file nor a folder"
            raise refusal(path, "", "a regular file", kind, "name a YAML file")
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise refusal(path, "", "a readable file", reason, "correct the path") from error
    except ValueError as error:  # a null byte in the path
        raise refusal(repr(path), "", "a path", str(error), "correct the path") from error
    if len(data) > MAX_FILE_BYTES:
        limit = f"at most {MAX_FILE_BYTES >> 20} MiB"
        raise refusal(path, "", limit, "a larger file", "split it into several files")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{data[error.start]:02x}"
        raise refusal(Place(str(path), line), "", "UTF-8", found, "save it as UTF-8") from error


def parse(text: str, file: str) -> LocatedMap:
    """The mapping that a file's text is.

    Raises:
        DatabaseError: it is no YAML, uses what a data file must not, or is no mapping.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(file)
    try:
        for event in yaml.parse(text, loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The end of a file counts as a line of its own.
        line = min(mark.line + 1 if mark is not None else 1, len(text.splitlines()) or 1)
        place = Place(file, line)
        found = str(error.problem or error.context or "something else")
        raise refusal(place, "", "YAML", found, "correct the syntax") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        found = f"the character {error.character!r}"[:60]
        remedy = "remove it"
        raise refusal(Place(file, line), "", "printable text", found, remedy) from error
    except yaml.YAMLError as error:
        found = " ".join(str(error).split())[:200]
        raise refusal(Place(file, 1), "", "YAML", found, "correct the syntax") from error
    return builder.document()


class _Builder:
    """Builds values from YAML events, one by one, without recursion."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._open: list[Container] = []
        self._keys: list[str | None] = []
        self._root: Any = None
        self._has_root = False
        self._num_values = 0

    def take(self, event: Any) -> None:
        """Add what one event says. Told apart by its class's name, the quickest way there is."""
        kind = type(event).__name__
        if kind == "ScalarEvent":
            place = self._place(event)
            if event.anchor is not None or event.tag is not None:
                self._refuse_extras(event, place)
            self._add(event, place)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._open.pop()
            self._keys.pop()
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            place = self._place(event)
            self._refuse_extras(event, place)
            is_map = kind == "MappingStartEvent"
            self._start(LocatedMap(place) if is_map else LocatedList(place), place)
        elif kind == "AliasEvent":
            place = self._place(event)
            raise self._refusal(place, "values written out", f"the alias *{event.anchor}")
        elif kind == "DocumentStartEvent" and self._has_root:
            raise self._refusal(self._place(event), "one document", "a second one after ---")

    def _place(self, event: Any) -> Place:
        self._num_values += 1
        place = Place(self._file, event.start_mark.line + 1)
        if self._num_values > MAX_VALUES:
            raise self._refusal(place, f"at most {MAX_VALUES} values", "more")
        return place

    def document(self) -> LocatedMap:
        """The finished mapping."""
        if not isinstance(self._root, LocatedMap):
            found = "an empty file" if self._root is None else f"a {type(self._root).__name__}"
            found = found.replace("LocatedList", "list")
            raise self._refusal(Place(self._file, 1), "a mapping", found)
        return self._root

    def _refusal(self, place: Place, required: str, found: str) -> DatabaseError:
        key = ".".join(name for name in self._keys if name is not None)
        return refusal(place, key, required, found, "write it as the built-in files do")

    def _refuse_extras(self, event: Any, place: Place) -> None:
        if event.anchor is not None:
            raise self._refusal(place, "values without anchors", f"the anchor &{event.anchor}")
        if event.tag is not None:
            raise self._refusal(place, "values without tags", f"the tag {event.tag}")

    def _start(self, container: Container, place: Place) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise self._refusal(place, f"at most {MAX_DEPTH} levels", "deeper nesting")
        self._attach(container, place)
        self._open.append(container)
        self._keys.append(None)

    def _add(self, event: Any, place: Place) -> None:
        parent = self._open[-1] if self._open else None
        if isinstance(parent, LocatedMap) and self._keys[-1] is None:
            key = str(event.value)
            if key in parent:
                found = f"a second one (the first is on line {parent.places[key].line})"
                raise refusal(place, key, "one value of a key", found, "remove one of them")
            parent[key] = None
            parent.places[key] = place
            self._keys[-1] = key
            return
        is_plain = event.implicit[0]
        self._attach(self._scalar(str(event.value), place) if is_plain else event.value, place)

    def _scalar(self, text: str, place: Place) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _NUMBER.match(text) is None:
            return text
        if len(text) > _MAX_NUMBER_CHARACTERS:
            limit = f"a number of at most {_MAX_NUMBER_CHARACTERS} characters"
            raise self._refusal(place, limit, f"{text[:40]}…")
        return float(text) if any(sign in text for sign in ".eE") else int(text)

    def _attach(self, value: Any, place: Place) -> None:
        if not self._open:
            self._root, self._has_root = value, True
            return
        parent = self._open[-1]
        if isinstance(parent, LocatedList):
            parent.append(value)
            parent.places.append(place)
            return
        key = self._keys[-1]
        if key is None:
            raise self._refusal(place, "a text as key", "a list or mapping")
        parent[key] = value
        self._keys[-1] = None
