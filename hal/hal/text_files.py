"""Text files that a user names: what may be read, and how one is written.

Read is a regular file of bounded size only: a pipe may never answer, a device never end. What is
generated replaces an older file of that name; what a person fills in is only ever a new file.
"""

from __future__ import annotations

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
    """Writes the text in UTF-8. Raises OSError; FileExistsError without `may_replace` if there is
    anything of that name. Halves of pairs, from names of files that are no UTF-8, become escapes.
    """
    data = text.encode("utf-8", "backslashreplace")  # before the older file is cut off
    with path.open("wb" if may_replace else "xb") as stream:
        stream.write(data)
