"""Whatever a file holds: a database, or a located error. Never another exception."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from database_files import CARD, HEAD, SOURCES, assert_located, write
from hal_capability_db import DatabaseError, load_database
from hal_capability_db.export import document_of
from hal_capability_db.facts import database_facts
from hal_capability_db.loader import draft_database

GOOD = HEAD + SOURCES + CARD
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What belongs to YAML, to the schema, or breaks lesser readers.
TOKENS = [
    *":-[]{}?&*!|>%@`#,\"'\n\t ",
    "\n---\n",
    "\n...\n",
    "<<: ",
    "&a ",
    "*a",
    "!!int ",
    "null",
    "true",
    "1e999",
    "-.inf",
    "0x10",
    "\u0000",
    "\ufeff",
    "\u2028",
    "\U0001f600",
    "id: ",
    "overrides: true\n",
    "source: [lab]",
    "9" * 40,
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["nvidia", "sm_120", "rtx-4090", "lab", "measured", "TFLOPS", "GB", "0x2bb5"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


def check(path: Path) -> None:
    """Every problem has its place; without one there is a database, which `load_database` has."""
    files = {str(path): path.read_bytes().decode("utf-8", errors="replace")}
    problems = draft_database((path,)).problems
    for problem in problems:
        assert_located(problem, files)
    # Under a name of its own, as a process reads a path once.
    fresh = path.rename(path.with_name(f"{next(_NUMBERS)}{path.suffix}"))
    if problems:
        with pytest.raises(DatabaseError) as caught:
            load_database((fresh,))
        assert_located(caught.value, {str(fresh): files[str(path)]})
    else:
        database = load_database((fresh,))
        assert all(facts.confidence for facts in database_facts(database).values())


_NUMBERS = itertools.count()


@SETTINGS
@given(data=st.binary(max_size=400))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    check(path)


@SETTINGS
@given(data=st.data())
def test_a_good_file_with_spans_replaced(tmp_path: Path, data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 30))
        new = "".join(data.draw(st.lists(st.sampled_from(TOKENS), max_size=3)))
        text = text[:start] + new + text[start + length :]
    check(write(tmp_path, text))


@SETTINGS
@given(data=st.data())
def test_a_good_file_with_lines_moved(tmp_path: Path, data: st.DataObject) -> None:
    lines = GOOD.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        taken = data.draw(st.integers(0, len(lines) - 1))
        line = lines[taken] if data.draw(st.booleans()) else lines.pop(taken)
        shift = " " * data.draw(st.integers(0, 4))
        lines.insert(data.draw(st.integers(0, len(lines))), shift + line)
    check(write(tmp_path, "".join(lines)))


@SETTINGS
@given(document=values)
def test_any_json(tmp_path: Path, document: Any) -> None:
    check(write(tmp_path, json.dumps(document), "mine.json"))


@SETTINGS
@given(sections=st.fixed_dictionaries({}, optional={"devices": values, "families": values}))
def test_sections_of_any_shape(tmp_path: Path, sections: dict[str, Any]) -> None:
    document = {"schema": "halstack.capability_db/1", **sections}
    check(write(tmp_path, json.dumps(document), "mine.json"))


@SETTINGS
@given(seed=st.integers(0, 2**32), new=values, count=st.integers(1, 3))
def test_an_export_with_values_replaced(tmp_path: Path, seed: int, new: Any, count: int) -> None:
    document = copy.deepcopy(_export())
    chooser = random.Random(seed)
    for _ in range(count):
        _replace_somewhere(document, new, chooser)
    check(write(tmp_path, json.dumps(document), "mine.json"))


@SETTINGS
@given(seed=st.integers(0, 2**32))
def test_an_export_with_keys_lost_and_doubled(tmp_path: Path, seed: int) -> None:
    document = copy.deepcopy(_export())
    chooser = random.Random(seed)
    holder, key = _somewhere(document, chooser)
    if isinstance(holder, dict):
        value = holder.pop(key)
        if chooser.random() < 0.5:
            holder[f"{key}x"] = value
    else:
        holder.append(copy.deepcopy(holder[key]))
    check(write(tmp_path, json.dumps(document), "mine.json"))


_EXPORTS: list[dict[str, Any]] = []


def _export() -> dict[str, Any]:
    if not _EXPORTS:
        _EXPORTS.append(document_of(draft_database(()), ["bi-v150", "l40s", "gfx906"]))
    return _EXPORTS[0]


def _somewhere(document: Any, chooser: random.Random) -> tuple[Any, Any]:
    """A container below `document` and a key or index of it, any depth."""
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in items:
            places.append((holder, key))
            if isinstance(value, dict | list):
                pending.append(value)
    return chooser.choice(places)


def _replace_somewhere(document: Any, new: Any, chooser: random.Random) -> None:
    holder, key = _somewhere(document, chooser)
    holder[key] = copy.deepcopy(new)
