"""Recordings of hosts as text: what is written is read; anything else is a located error."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import HostReadError
from hal.host import HOST_SCHEMA, CommandOutput, RecordedHost, load_recorded_host

_TEXT = st.text(max_size=40)
_WORD = st.from_regex(r"[a-z][a-z0-9_.:-]{0,8}", fullmatch=True)
_PATH = st.lists(_WORD, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))
_OUTPUT = st.builds(CommandOutput, st.integers(-64, 255), _TEXT, _TEXT)
_HOSTS = st.builds(
    RecordedHost,
    files=st.dictionaries(_PATH, st.none() | _TEXT, max_size=6),
    links=st.dictionaries(
        st.from_regex(r"/l[a-z]/[a-z]", fullmatch=True),
        st.from_regex(r"/t[a-z]/[a-z]", fullmatch=True),
        max_size=4,
    ),
    nodes=st.frozensets(_PATH, max_size=4),
    environment=st.dictionaries(_WORD, _TEXT, max_size=4),
    packages=st.dictionaries(_WORD, _TEXT, max_size=4),
    package_files=st.dictionaries(
        _WORD, st.dictionaries(_WORD, st.none() | _TEXT, max_size=2), max_size=2
    ),
    modules=st.frozensets(_WORD, max_size=4),
    commands=st.dictionaries(_TEXT, st.none() | _OUTPUT, max_size=4),
    description=_TEXT,
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(_HOSTS)
@settings(deadline=None)
def test_what_is_written_is_read(host: RecordedHost) -> None:
    again = RecordedHost.from_json(host.to_json())
    assert again == host
    assert again.to_json() == host.to_json()


def _empty(**changes: Any) -> dict[str, Any]:
    return json.loads(RecordedHost().to_json()) | changes


def _refusal(text: str) -> HostReadError:
    with pytest.raises(HostReadError) as caught:
        RecordedHost.from_json(text, "host recording x.json")
    assert caught.value.who.startswith("host recording x.json")
    assert "record the host again" in caught.value.remedy
    str(caught.value).encode()  # printable, whatever the document holds
    return caught.value


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_any_value_anywhere_is_read_or_refused_with_its_place(data: st.DataObject) -> None:
    document = json.loads(data.draw(_HOSTS).to_json())
    place = data.draw(st.sampled_from(sorted(document)))
    value = document[place]
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        value[data.draw(st.sampled_from(sorted(value)))] = data.draw(_JSON)
    elif isinstance(value, dict) and data.draw(st.booleans()):
        value[data.draw(st.text(max_size=5))] = data.draw(_JSON)
    else:
        document[place] = data.draw(_JSON)
    text = json.dumps(document)
    try:
        host = RecordedHost.from_json(text, "host recording x.json")
    except HostReadError as error:
        text = str(error)
        text.encode()
        assert place in text or "circle" in text or place == "schema", (place, text)
    else:
        assert RecordedHost.from_json(host.to_json()) == host


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("latin-1")))
def test_any_text_is_refused(text: str) -> None:
    _refusal(text)


@given(_HOSTS, st.data())
@settings(deadline=None)
def test_a_cut_or_patched_recording_is_read_or_refused(
    host: RecordedHost, data: st.DataObject
) -> None:
    text = host.to_json()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    patched = text[:start] + data.draw(st.text(max_size=8)) + text[end:]
    try:
        RecordedHost.from_json(patched)
    except HostReadError as error:
        str(error).encode()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], ["JSON object", "list"]),
        ({}, [f'"schema": "{HOST_SCHEMA}"', "no schema"]),
        ({"files": {}, "packages": {}}, ["no schema"]),
        (_empty(schema="halstack.host/2"), ["schema 'halstack.host/2'"]),
        ({"schema": HOST_SCHEMA, "files": {}}, ["commands and description and", "missing"]),
        (_empty(extra=1), ["unknown 'extra'"]),
        (_empty(files={"/a": 3}), ["files, '/a'", "text", "3"]),
        (_empty(files={"a": ""}), ["files", "absolute path", "'a'"]),
        (_empty(files={"/a": "\ud800"}), ["files, '/a'", "Unicode", r"'\ud800'"]),
        (_empty(nodes={"/a": 1}), ["nodes", "a list", "dict"]),
        (_empty(nodes=["/a\0"]), ["nodes", "printable"]),
        (_empty(modules=[["x"]]), ["modules", "text", "list"]),
        (_empty(links={"/a": "b"}), ["links, '/a'", "absolute path", "'b'"]),
        (_empty(links={"/a": "/b", "/b": "/a"}), ["circle"]),
        (_empty(commands={"x": [0, ""]}), ["commands, 'x'", "exit code"]),
        (_empty(commands={"x": ["0", "", ""]}), ["commands, 'x'", "whole number", "'0'"]),
        (_empty(commands={"x": [0, None, ""]}), ["commands, 'x'", "text", "None"]),
        (_empty(packages={"torch": None}), ["packages, 'torch'", "text"]),
        (_empty(package_files={"torch": {"a": 1}}), ["package_files, 'torch', 'a'"]),
    ],
)
def test_refusal_says_where_and_what(document: Any, words: list[str]) -> None:
    with pytest.raises(HostReadError) as caught:
        RecordedHost.from_json(json.dumps(document))
    for word in words:
        assert word in str(caught.value)


def test_hostile_json() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert "levels" in _refusal(deep).found
    assert "twice" in _refusal('{"schema": "x", "schema": "y"}').found
    assert re.search("digits|number", _refusal("1" * 10_000).found)
    many = json.dumps(_empty(nodes=[f"/{n}" for n in range(200_001)]))
    assert "200001" in _refusal(many).found


def test_recording_file(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    host = RecordedHost(files={"/sys/a": "1"}, description="a host")
    file.write_text(host.to_json())
    assert load_recorded_host(file) == host
    with pytest.raises(HostReadError, match="FileNotFoundError"):
        load_recorded_host(tmp_path / "none.json")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(HostReadError, match="UnicodeDecodeError"):
        load_recorded_host(file)
    with pytest.raises(HostReadError, match="regular file"):
        load_recorded_host(Path("/dev/zero"))
