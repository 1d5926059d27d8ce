"""Text files that a user names: what may be read, and how one is written.

Read is a regular file of bounded size only: a pipe may never answer, a device never end. What is
generated replaces an older file of that name, whole or not at all; what a person fills in is only
ever a new file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = 4 << 20


def read_regular_text(path: Path | str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8.

    Raises OSError, also for a file that is not regular or longer than `max_bytes`, and
    UnicodeDecodeError.
    """
    try:
        # Opening a pipe without a writer would wait for one.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a null character in the name
        raise OSError(errno.EINVAL, str(error), repr(path)) from error
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "neither a file nor a folder"
            raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
        chunks, left = [], max_bytes + 1
        while left and (chunk := os.read(handle, left)):
            chunks.append(chunk)
            left -= len(chunk)
    finally:
        os.close(handle)
    data = b"".join(chunks)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return data.decode("utf-8")


def write_user_text(path: Path, text: str, *, may_replace: bool = True) -> None:
    """Writes the text in UTF-8, beside its place and then moved there: after an error an older file
    is as it was. A link stays one, and its file is replaced; so are the file's permissions kept.

    Raises OSError, also for a place that is a folder, a pipe or a device; FileExistsError without
    `may_replace` if there is anything of that name. Halves of pairs, from names of files that are
    no UTF-8, become escapes.
    """
    data = text.encode("utf-8", "backslashreplace")
    if not may_replace:
        _write_new(path, data)
        return
    place = _real_place(path)
    mode = _mode_of(place)
    partial = place.with_name(f".{place.name[:200]}.{os.getpid()}.part")
    try:
        _write_new(partial, data)
        if mode is not None:
            partial.chmod(mode)
        partial.replace(place)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


def _write_new(path: Path, data: bytes) -> None:
    """Whole or not at all, unless the machine stops."""
    with path.open("xb") as stream:
        try:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        except OSError:
            path.unlink()
            raise


def _real_place(path: Path) -> Path:
    try:
        return path.resolve()
    except (ValueError, RuntimeError) as error:  # a null character; links that go round
        raise OSError(errno.EINVAL, str(error), repr(path)) from error


def _mode_of(place: Path) -> int | None:
    """Permissions of the file there; None for none. Raises OSError for what is no regular file."""
    try:
        found = place.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        kind = "a folder" if stat.S_ISDIR(found) else "neither a file nor a folder"
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(place))
    return stat.S_IMODE(found)
