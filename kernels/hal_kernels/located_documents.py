"""Reads JSON files of this package's kinds: what is wrong is said with the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hal.errors import SettingsError
from hal.text_files import read_regular_text

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_BYTES = 64 << 20


def read_document(
    model: type[_Model], path: Path, remedy: str = "correct the file, or move it away"
) -> _Model:
    """The file as `model`. Raises SettingsError with the place of what is wrong."""
    try:
        document = json.loads(read_regular_text(path, _MAX_BYTES))
        return model.model_validate(document)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        more = f" ({len(others)} more)" if others else ""
        found = f"at {place}: {first['msg']}, found {_short(first['input'])}{more}"
        raise SettingsError(f"file {path}", _title(model), found, remedy) from error
    except (OSError, ValueError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
        raise SettingsError(f"file {path}", _title(model), found, remedy) from error


def modified_at(path: Path, remedy: str) -> int | None:
    """When a file was last written, in ns, so that what was read of it is kept until then; None if
    there is none. Raises SettingsError for one that cannot be looked at."""
    try:
        return path.stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        raise SettingsError(f"file {path}", "a file that can be read", found, remedy) from error


def _title(model: type[BaseModel]) -> str:
    fields = model.model_fields.get("schema_")
    known = getattr(fields.annotation, "__args__", ("",))[0] if fields else ""
    return f"a document of schema {known}" if known else f"a {model.__name__}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
