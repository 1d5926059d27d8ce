"""Small capability database files to write, break and load."""

from __future__ import annotations

import re
from pathlib import Path

from hal_capability_db import DatabaseError

HEAD = "schema: halstack.capability_db/1\n"
SOURCES = "sources: {lab: our own measurements}\n"
CARD = """\
devices:
  - id: my-card
    family: nvidia
    name: My Card
    arch: sm_120
    identity:
      pci_devices: [{id: "0x1234"}]
      names: [My Card]
      source: [lab]
      confidence: measured
    peak:
      - values: {bfloat16: 100, fp8: 200}
        unit: TFLOPS
        source: [lab]
        confidence: measured
    memory: {value: 48, unit: GB, source: [lab], confidence: measured}
"""
_PLACE = re.compile(r"(?P<file>.+?):(?P<line>[0-9]+)(?:, (?P<key>.*))?\Z", re.DOTALL)


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    """The file, written."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def place_of(error: DatabaseError) -> tuple[str, int, str]:
    """(file, line, key) of an error about a file; fails for one that has no place."""
    match = _PLACE.match(error.who)
    assert match is not None, f"no place in {error.who!r}"
    return match["file"], int(match["line"]), match["key"] or ""


def assert_located(error: DatabaseError, files: dict[str, str]) -> None:
    """Every part of the message is there, and the place exists in one of `files` (path: text)."""
    assert all((error.required, error.found, error.remedy)), error.to_document()
    if error.who in files:
        return  # about the file as a whole: it cannot be read at all
    file, line, _ = place_of(error)
    assert file in files, error.who
    assert 1 <= line <= max(1, len(files[file].splitlines())), error.who
