"""Reading JSON files of a model folder strictly: what is ambiguous is an error, not a guess."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from hal.errors import UserError

MAX_JSON_BYTES = 256 * 2**20  # the largest tokenizer.json seen in the wild is about 35 MB


class JsonFileError(UserError, ValueError):
    """A JSON file cannot be read or is ambiguous. The message names the file and the reason."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`.

    Refused with JsonFileError: a missing or irregular file (folder, FIFO, symlink loop), one above
    MAX_JSON_BYTES, bytes that are not UTF-8, duplicate keys, NaN and infinities, another top level
    than an object, nesting beyond the parser's depth.
    """
    return parse_json_object(path, read_regular_text(path))


def parse_json_object(path: Path, text: str) -> dict[str, Any]:
    """The object in `text`, which stands in `path`; refuses what `read_json_object` does."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=lambda pairs: _object_without_duplicates(path, pairs),
            parse_constant=lambda word: _refuse_constant(path, word),
        )
    except JsonFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonFileError(f"{path}: required valid JSON, found: {error}") from error
    if not isinstance(value, dict):
        raise JsonFileError(
            f"{path}: required a JSON object at the top level, found {type(value).__name__}"
        )
    return value


def read_regular_text(path: Path) -> str:
    """UTF-8 text of a regular file of at most MAX_JSON_BYTES; JsonFileError otherwise."""
    size_bytes = regular_file_size(path)
    if size_bytes > MAX_JSON_BYTES:
        raise JsonFileError(f"{path}: required at most {MAX_JSON_BYTES} bytes, found {size_bytes}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JsonFileError(f"{path}: required UTF-8 text, found: {error}") from error
    except OSError as error:
        raise JsonFileError(f"{path}: cannot be read: {error.strerror or error}") from error


def regular_file_size(path: Path) -> int:
    """Size in bytes; JsonFileError for anything but a regular file (links are followed)."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ELOOP for symlink loops; ValueError for NUL in a name
        reason = getattr(error, "strerror", None) or str(error)
        raise JsonFileError(f"{path}: required a regular file, found: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise JsonFileError(f"{path}: required a regular file, found {kind}")
    return status.st_size


def _object_without_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonFileError(f"{path}: required each key once, found {repeated!r} twice")
    return result


def _refuse_constant(path: Path, word: str) -> Any:
    raise JsonFileError(f"{path}: required finite numbers, found {word}")
