"""Files of reports: whole or untouched when written, located errors when read."""

from __future__ import annotations

import json
import os
import select
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from audit_reports import finding, report
from hal.auditing import report_files
from hal.auditing.report_files import read_report, write_report_file
from hal.errors import DocumentError


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("older")
    path.chmod(0o640)
    write_report_file(path, "new\n")
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]
    fresh = tmp_path / "fresh"
    write_report_file(fresh, "half of a pair: \ud800")
    assert fresh.read_bytes() == b"half of a pair: \\ud800"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o666 & ~mask


def test_a_failure_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_text("older")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report_files.os, "fsync", full)
    with pytest.raises(DocumentError, match="No space left"):
        write_report_file(path, "new", who="option --json")
    assert path.read_text() == "older"
    assert [item.name for item in tmp_path.iterdir()] == ["report.json"]


def test_links_stay_and_folders_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("older")
    link = tmp_path / "link"
    link.symlink_to(target)
    write_report_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    with pytest.raises(DocumentError, match="the folder"):
        write_report_file(tmp_path, "new")


def test_a_pipe_gets_the_text_if_somebody_reads_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DocumentError):
        write_report_file(pipe, "nobody reads")
    read: list[str] = []
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def reader() -> None:
        select.select([handle], [], [], 30)  # until a writer has come
        os.set_blocking(handle, True)
        with open(handle) as stream:
            read.append(stream.read())

    thread = threading.Thread(target=reader)
    write_thread = threading.Thread(target=write_report_file, args=(pipe, "text" * 50_000))
    write_thread.start()
    thread.start()
    write_thread.join(30)
    thread.join(30)
    assert read == ["text" * 50_000]


def broken(**changes: Any) -> str:
    """A good report with top-level keys replaced."""
    return json.dumps({**json.loads(report(findings=(finding(),)).to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1, column 1", "JSON"]),
        ("{", ["line 1, column 2"]),
        ("[]", ["a JSON object", "list"]),
        ("{}", ["key schema", '"halstack.audit/1"', "no schema"]),
        (broken(schema="halstack.audit/2"), ["key schema", "'halstack.audit/2'"]),
        (broken(schema=7), ["key schema", "schema 7"]),
        ('{"schema": "a", "schema": "b"}', ["each key once", "'schema' twice"]),
        ('{"schema": NaN}', ["finite", "NaN"]),
        (f'{{"x": {"9" * 5000}}}', ["JSON", "digits"]),
        ("[" * 100_000, ["too many levels"]),
        ('{"a":' * 100_000, ["too many levels"]),
        (broken(rows=[{"op": "gemm"}]), ["key rows[0].implementation", "a value", "nothing"]),
        (broken(rows="none"), ["key rows", "'none'"]),
        (broken(findings=[{**json.loads(finding().model_dump_json()), "calls": "3"}]),
         ["key findings[0].calls", "integer", "'3'"]),
        (broken(kind="x"), ["key kind", "'model' or 'program'"]),
        (broken(extra=1), ["key extra", "the unknown key 'extra'"]),
        (broken(time_us=1e999), ["finite"]),
        (broken(coverage={"native": {"calls": -1, "speed": 3}}),
         ["coverage.native.calls", "(and 1 more)"]),
        (broken(coverage={"native": {"speed": 3}}), ["coverage.native.speed"]),
        (broken(subject="bad \ud800 half"), ["subject"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_report_is_located(
    text: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(DocumentError) as raised:
        read_report(path)
    message = str(raised.value)
    for word in (str(path), *words):
        assert word in message
    assert len(message) < 1500


def test_what_is_no_file_of_sane_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe", "none", "x" * 5000, "null\0"):
        with pytest.raises(DocumentError, match="readable file"):
            read_report(tmp_path / name)
    monkeypatch.setattr(report_files, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "large.json").write_text(report().to_json() + " " * 1000)
    with pytest.raises(DocumentError, match="larger than 1000 bytes"):
        read_report(tmp_path / "large.json")
    (tmp_path / "latin.json").write_bytes(b'{"x": "\xe9"}')
    with pytest.raises(DocumentError, match="UTF-8"):
        read_report(tmp_path / "latin.json")
