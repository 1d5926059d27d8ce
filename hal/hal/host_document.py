"""The format of a recorded host, "halstack.host/1": which keys it has and what each may hold.

Whatever is wrong with a document is a `HostReadError` that says where, never a crash: recordings
come from other people's machines.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hal.errors import HostReadError
from hal.host_probe import CommandOutput

HOST_SCHEMA = "halstack.host/1"
MAX_RECORDING_BYTES = 64 << 20
MAX_ENTRIES = 200_000
_MAX_SHOWN = 80
_REMEDY = "record the host again with `hal devices --record FILE`"


def write_document(fields: Mapping[str, Any]) -> str:
    """The fields of a `RecordedHost` as JSON."""
    document = {
        "schema": HOST_SCHEMA,
        "description": fields["description"],
        "files": dict(fields["files"]),
        "links": dict(fields["links"]),
        "nodes": sorted(fields["nodes"]),
        "environment": dict(fields["environment"]),
        "packages": dict(fields["packages"]),
        "package_files": {name: dict(files) for name, files in fields["package_files"].items()},
        "modules": sorted(fields["modules"]),
        "commands": {
            command: None if output is None else [output.exit_code, output.stdout, output.stderr]
            for command, output in fields["commands"].items()
        },
    }
    return json.dumps(document, sort_keys=True, indent=1)


def parse_document(text: str, source: str) -> dict[str, Any]:
    """The fields of a `RecordedHost`, each checked.

    Raises:
        HostReadError: not JSON, another version, a key too many or too few, a value of another
            type; `source` and the place in the document are named.
    """
    if len(text) > MAX_RECORDING_BYTES:
        _refuse(source, f"at most {MAX_RECORDING_BYTES} bytes", f"{len(text)} characters")
    document = _parse_json(text, source)
    if not isinstance(document, dict):
        _refuse(source, "a JSON object", _shown(document))
    version = document.pop("schema", None)
    if version != HOST_SCHEMA:
        found = "no schema" if version is None else f"schema {_shown(version)}"
        _refuse(source, f'"schema": "{HOST_SCHEMA}"', found)
    missing = sorted(_READERS.keys() - document.keys())
    unknown = sorted(document.keys() - _READERS.keys())
    if missing or unknown:
        parts = [f"{' and '.join(missing)} missing"] if missing else []
        parts += [f"unknown {_shown(unknown[0])}"] if unknown else []
        _refuse(source, f"the keys {', '.join(sorted(_READERS))}", ", ".join(parts))
    return {key: read(document[key], f"{source}, {key}") for key, read in _READERS.items()}


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, source))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        _refuse(f"{source}, {where}", "JSON", error.msg, error)
    except (ValueError, RecursionError) as error:
        found = "too many levels" if isinstance(error, RecursionError) else str(error)[:_MAX_SHOWN]
        _refuse(source, "JSON", found, error)


def _unique(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            _refuse(source, "each key once", f"{_shown(key)} twice")
        found[key] = value
    return found


def _refuse(who: str, required: str, found: str, cause: Exception | None = None) -> NoReturn:
    raise HostReadError(who, required, found, _REMEDY) from cause


def _shown(value: object) -> str:
    # ascii: an error message must be printable whatever the document holds.
    text = ascii(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        _refuse(where, "text", _shown(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(where, "Unicode text", _shown(value), error)
    return value


def _text_or_null(value: object, where: str) -> str | None:
    return None if value is None else _text(value, where)


def _name(value: object, where: str) -> str:
    name = _text(value, where)
    if not name or not name.isprintable():
        _refuse(where, "printable text", _shown(name))
    return name


def _path(value: object, where: str) -> str:
    path = _name(value, where)
    if not path.startswith("/"):
        _refuse(where, "an absolute path", _shown(path))
    return path


def _command(value: object, where: str) -> CommandOutput | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        _refuse(where, "null or a list of exit code, stdout and stderr", _shown(value))
    code, out, err = value
    if not isinstance(code, int) or isinstance(code, bool) or abs(code) > 1 << 31:
        _refuse(where, "a whole number as exit code", _shown(code))
    return CommandOutput(code, _text(out, where), _text(err, where))


_Reader = Callable[[object, str], Any]


def _mapping(read_key: _Reader, read_value: _Reader) -> _Reader:
    def read(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            _refuse(where, "a JSON object", _shown(value))
        _check_count(value, where)
        return {
            read_key(key, where): read_value(item, f"{where}, {_shown(key)}")
            for key, item in value.items()
        }

    return read


def _set(read_item: _Reader) -> _Reader:
    def read(value: object, where: str) -> frozenset[str]:
        if not isinstance(value, list):
            _refuse(where, "a list", _shown(value))
        _check_count(value, where)
        return frozenset(read_item(item, where) for item in value)

    return read


def _check_count(value: dict[str, Any] | list[Any], where: str) -> None:
    if len(value) > MAX_ENTRIES:
        _refuse(where, f"at most {MAX_ENTRIES} entries", str(len(value)))


_READERS: Mapping[str, _Reader] = {
    "description": _text,
    "files": _mapping(_path, _text_or_null),
    "links": _mapping(_path, _path),
    "nodes": _set(_path),
    "environment": _mapping(_name, _text),
    "packages": _mapping(_name, _text),
    "package_files": _mapping(_name, _mapping(_name, _text_or_null)),
    "modules": _set(_name),
    "commands": _mapping(_text, _command),
}
