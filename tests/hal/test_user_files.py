"""Files that a user names: a pipe, a device or a folder is an error at once; escapes in a recording
or a path never reach the terminal."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from hal.cli.output import VisibleConsole, print_error, print_json
from hal.device import DeviceSpec
from hal.errors import HalError, HostReadError, SettingsError, UsageError, WaiverError
from hal.host_recorded import load_recorded_host
from hal.measurements import save_measurements, with_measurements
from hal.settings import Settings
from hal.text_files import read_regular_text, write_user_text
from hal.visible_text import visible_json, visible_text
from hal.waivers import load_waivers

_READERS: dict[type[HalError], Callable[[Path], object]] = {
    HostReadError: load_recorded_host,
    WaiverError: load_waivers,
    SettingsError: lambda path: Settings.read(config=path, environment={}),
}


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def _circle(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def _huge(folder: Path) -> Path:
    with (folder / "huge").open("wb") as stream:
        stream.truncate(1 << 40)  # a file with a hole: it takes no room
    return folder / "huge"


@pytest.mark.parametrize("error", _READERS, ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    "make",
    [
        _pipe,
        _circle,
        _huge,
        lambda folder: folder,
        lambda folder: Path("/dev/zero"),
        lambda folder: folder / "absent",
        lambda folder: folder / "nul\0l",
    ],
    ids=["pipe", "circle", "huge", "folder", "device", "absent", "null character"],
)
def test_what_cannot_be_read_is_said_at_once(
    tmp_path: Path, error: type[HalError], make: Callable[[Path], Path]
) -> None:
    with pytest.raises(error) as raised:
        _READERS[error](make(tmp_path))
    assert raised.value.remedy
    assert "required" in str(raised.value)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 100_000, "a = " + "9" * 10_000, "a = ", "a = 1979-13-45"], ids=len
)
def test_text_that_is_no_toml_is_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    for error in (WaiverError, SettingsError):
        with pytest.raises(error, match="required: TOML"):
            _READERS[error](file)


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    text = "ä" * 1000
    file = tmp_path / "file"
    file.write_text(text, encoding="utf-8")
    assert read_regular_text(file, 2000) == text
    with pytest.raises(OSError, match="larger than 1999"):
        read_regular_text(file, 1999)


def test_a_generated_file_replaces_and_a_template_does_not(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_user_text(file, "first", may_replace=False)
    with pytest.raises(FileExistsError):
        write_user_text(file, "second", may_replace=False)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        write_user_text(tmp_path / "link", "second", may_replace=False)
    assert file.read_text() == "first"
    write_user_text(file, "name of a file: \udcff")
    assert file.read_text(encoding="utf-8") == r"name of a file: \udcff"
    assert stat.S_ISREG(file.stat().st_mode)


@pytest.mark.parametrize("may_replace", [True, False])
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_replace: bool
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    file = tmp_path / "file"
    if may_replace:
        file.write_text("older")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_user_text(file, "newer", may_replace=may_replace)
    assert [path.name for path in tmp_path.iterdir()] == (["file"] if may_replace else [])
    assert not may_replace or file.read_text() == "older"


def test_a_file_is_moved_to_its_place_behind_links_with_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.write_text("older")
    file.chmod(0o640)
    link.symlink_to("folder/file")
    before = file.stat().st_ino
    write_user_text(link, "newer")
    assert file.read_text() == "newer"
    assert link.is_symlink()
    assert file.stat().st_ino != before  # another file in its place, never a half-written one
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list((tmp_path / "folder").iterdir()) == [file]


@pytest.mark.parametrize(
    "make",
    [lambda folder: folder, lambda folder: Path("/dev/null"), _pipe, _circle],
    ids=["folder", "device", "pipe", "circle"],
)
def test_only_a_regular_file_is_replaced(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    place = make(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError):  # noqa: PT011 - the words are the system's
        write_user_text(place, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def _is_harmless(text: str) -> bool:
    kinds = {unicodedata.category(char) for char in text if char not in "\n\t"}
    return kinds.isdisjoint({"Cc", "Cs", "Zl", "Zp"})


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_shown_and_none_obeyed(text: str) -> None:
    assert _is_harmless(visible_text(text))
    visible_text(text).encode()  # no half of a pair is left
    if _is_harmless(text) and text.isprintable():
        assert visible_text(text) == text
    document = json.dumps([text], ensure_ascii=False)
    assert _is_harmless(visible_json(document))
    (read,) = json.loads(visible_json(document))
    # JSON joins two halves of a pair that stand side by side.
    assert read.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass")


_ESCAPES = "name\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe\udcff"


def test_consoles_errors_and_json_have_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    console = VisibleConsole(markup=False, highlight=False)
    table = Table("column", title=_ESCAPES)
    table.add_row(Text(_ESCAPES))
    for part in (_ESCAPES, Text(_ESCAPES), table):
        console.print(part)
    print_error(UsageError(_ESCAPES, "a", _ESCAPES, "b"), is_debug=True)
    print_json({_ESCAPES: _ESCAPES})
    shown = capsys.readouterr()
    assert _is_harmless(shown.out)
    assert _is_harmless(shown.err)
    assert "\u202e" not in shown.out + shown.err
    assert r"\x1b]0;title" in shown.out
    assert r"\x1b]0;title" in shown.err


def test_measurements_that_cannot_be_kept_are_said_and_damaged_ones_count_as_none(
    tmp_path: Path,
) -> None:
    device = DeviceSpec(
        device_id="acme:0",
        vendor="Acme",
        backend="acme",
        name="One",
        arch="a1",
        torch_device="cpu",
        memory_bandwidth=1e12,
    )
    (tmp_path / "taken").write_text("")
    with pytest.raises(HostReadError, match="XDG_CACHE_HOME"):
        save_measurements(device, tmp_path / "taken")
    file = save_measurements(device, tmp_path)
    assert with_measurements(device, tmp_path) == device
    for damaged in ("[" * 100_000, "{", file.read_text().replace("1000000000000.0", "1e-300")):
        file.write_text(damaged)
        other = dataclasses.replace(device, memory_bandwidth=2e12)
        assert with_measurements(other, tmp_path) == other
