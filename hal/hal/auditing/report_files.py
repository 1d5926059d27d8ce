"""Files of audits, locks and plans: written whole or not at all, read with located errors.

Writing makes a temporary file beside the target and renames it, so that nobody reads half a report
and a full disk leaves the older one. Reading trusts nothing: regular files of bounded size only,
JSON without repeated keys, without numbers that are not finite, of few levels.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, Final, NoReturn

from pydantic import ValidationError

from hal.auditing.document import SCHEMA, AuditReport
from hal.auditing.totals import totals_problem
from hal.errors import DocumentError
from hal.text_files import read_regular_text

MAX_DOCUMENT_BYTES: Final = 64 << 20
_SHOWN = 80
_REMEDY = "name another file or folder"
_NOT_AS_WRITTEN = "it is not as halstack writes it: write it anew"


def check_writable(path: Path, who: str) -> None:
    """Refuses a place that cannot be written, long before it is.

    Raises:
        DocumentError: a folder, or a file in a folder that is not there or is closed to us.
    """
    if "\0" in str(path):
        _refuse_place(who, "a file name", "a null character in it")
    try:
        if path.is_dir():
            _refuse_place(who, "a file", f"the folder {path}")
        folder = path.parent
        if not folder.is_dir():
            _refuse_place(who, "a file in a folder that exists", f"no folder {folder}")
        is_special = path.exists() and not path.is_file()
        if not os.access(path if is_special else folder, os.W_OK):
            _refuse_place(who, "a place that may be written", f"no permission for {path}")
    except OSError as error:  # a name too long
        raise DocumentError(who, "a file name", f"{path}: {error}", _REMEDY) from error


def _refuse_place(who: str, required: str, found: str) -> NoReturn:
    raise DocumentError(who, required, found, _REMEDY)


def write_report_file(path: Path, text: str, *, who: str = "report") -> None:
    """Writes the text in UTF-8 so that the file is the older one or the whole new one.

    A link keeps being one: what it points to is replaced. A pipe or device (`/dev/stdout`) is
    written to. Halves of surrogate pairs become escapes.

    Raises:
        DocumentError: a folder, a place without permission, a full disk.
    """
    data = text.encode("utf-8", "backslashreplace")
    check_writable(path, who)
    try:
        if path.exists() and not path.is_file():
            _write_through(path, data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except OSError as error:
        found = f"{path}: {error.strerror or error}"
        raise DocumentError(who, "a file that can be written", found, _REMEDY) from error


def _write_through(path: Path, data: bytes) -> None:
    # Without O_NONBLOCK a pipe that nobody reads would wait for a reader for ever.
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(handle, True)
    with open(handle, "wb") as stream:
        stream.write(data)


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), _mode_of(path))
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _mode_of(path: Path) -> int:
    """The permissions of the older file, else those that any new file gets."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask


def read_report(path: Path) -> AuditReport:
    """The audit report in a file.

    Raises:
        DocumentError: names file, key, what was required and what was found; also for totals that
            are not those of the rows.
    """
    text = read_document_text(path)
    document = parse_document(text, path)
    version = document.get("schema")
    if version != SCHEMA:
        found = "no schema" if version is None else f"schema {shown(version)}"
        remedy = (
            "write it anew with this version of halstack, or read it with the one that wrote it"
        )
        raise DocumentError(f"{path}, key schema", f'"{SCHEMA}"', found, remedy)
    try:
        report = AuditReport.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise located_error(error, path) from error
    if (problem := totals_problem(report)) is not None:
        raise DocumentError(
            f"{path}, key {problem.key}", problem.required, problem.found, _NOT_AS_WRITTEN
        )
    return report


def located_error(error: ValidationError, path: Path) -> DocumentError:
    """The first thing that pydantic found wrong with a document, with its key."""
    first = error.errors(include_url=False, include_context=False)[0]
    key = dotted_key(first["loc"])
    count = error.error_count() - 1
    more = f" (and {count} more)" if count else ""
    found = shown(first["input"])
    required = first["msg"].removeprefix("Input should be ")
    if first["type"] == "extra_forbidden":
        required, found = "only keys of the schema", f"the unknown key {shown(first['loc'][-1])}"
    elif first["type"] == "missing":
        required, found = "a value", "nothing"
    return DocumentError(f"{path}, key {key}", required, found + more, _NOT_AS_WRITTEN)


def dotted_key(parts: tuple[int | str, ...]) -> str:
    """`rows[3].leaf.state`."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text or "(the whole)"


def read_document_text(path: Path) -> str:
    """The text of a JSON file of ours.

    Raises:
        DocumentError: missing, no regular file, too large, no UTF-8.
    """
    who = f"file {path}"
    try:
        return read_regular_text(path, MAX_DOCUMENT_BYTES)
    except UnicodeDecodeError as error:
        raise DocumentError(who, "text in UTF-8", str(error), "name a JSON file") from error
    except OSError as error:
        found = error.strerror or str(error)
        if error.errno == errno.EFBIG:
            found = f"a file {found}"
        raise DocumentError(who, "a readable file", found, "correct the path") from error


def parse_document(text: str, path: Path) -> dict[str, Any]:
    """The object that is the whole of a JSON text.

    Raises:
        DocumentError: no JSON (with line and column), a repeated key, a number that is not finite,
            too many levels, another top level than an object.
    """
    who = f"file {path}"
    remedy = "name a report, lock or plan that halstack wrote as JSON"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise DocumentError(who, "each key once", f"{shown(key)} twice", remedy)
            result[key] = value
        return result

    def constant(word: str) -> NoReturn:
        raise DocumentError(who, "numbers that are finite", word, remedy)

    try:
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"{who}, line {error.lineno}, column {error.colno}"
        raise DocumentError(where, "JSON", error.msg, remedy) from error
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        found = "too many levels" if isinstance(error, RecursionError) else str(error)[:_SHOWN]
        raise DocumentError(who, "JSON", found, remedy) from error
    if not isinstance(document, dict):
        raise DocumentError(who, "a JSON object", type(document).__name__, remedy)
    return document


def shown(value: object) -> str:
    """A value of a foreign document for an error: short, and printable whatever it is."""
    plain = isinstance(value, str | int | float | bool) or value is None
    text = ascii(value) if plain else type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
