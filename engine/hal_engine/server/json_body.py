"""Reading a request body as JSON, strictly: what is ambiguous or unbounded is refused.

Refused with a 4xx: invalid UTF-8, a byte-order mark, duplicate keys,
NaN, infinities and numbers that overflow to them, integers beyond 64 bits and more, lone
surrogates, nesting beyond the limit, another top level than an object.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from hal_engine.server.errors import ApiError, invalid

# Strings are skipped as a whole, so that brackets within them do not count. Linear on any input:
# the parts of the pattern start with different characters, so there is nothing to backtrack into.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_INTEGER_DIGITS = 40  # more than any field takes; int() of longer texts is quadratic


def is_json_content_type(content_type: str) -> bool:
    """Whether a Content-Type header announces JSON, whatever its parameters."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def parse_json_object(body: bytes, *, max_depth: int) -> dict[str, Any]:
    """The object in `body`; ApiError 400 that says what is wrong with it otherwise."""
    _check_depth(body, max_depth)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not valid UTF-8") from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_number,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except RecursionError as error:
        raise _bad_json("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise _bad_json(f"a JSON object is required, found {json_type_name(value)}")
    if _SURROGATE_ESCAPE.search(body):  # the only way a surrogate gets into decoded UTF-8
        _refuse_lone_surrogates(value)
    return value


def json_type_name(value: Any) -> str:
    """The JSON name of a parsed value's type, for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _check_depth(body: bytes, max_depth: int) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                raise _bad_json(f"it is nested deeper than {max_depth} levels")
        elif first in b"]}":
            depth -= 1


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise invalid(
                    f"The key {_shown(key)} appears twice in one JSON object.",
                    param=None,
                    code="duplicate_key",
                )
            seen.add(key)
    return result


def _refuse_number(text: str) -> NoReturn:
    shown = text if len(text) <= 40 else text[:40] + "…"
    raise invalid(f"{shown} is not a number this API takes.", code="invalid_number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse_number(text)
    return value


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_INTEGER_DIGITS:
        _refuse_number(text)
    return int(text)


def _refuse_lone_surrogates(document: dict[str, Any]) -> None:
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, str):
            _refuse_lone_surrogate(value, path)
        elif isinstance(value, list):
            pending.extend((f"{path}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                _refuse_lone_surrogate(key, path)
                pending.append((f"{path}.{key}" if path else key, item))


def _refuse_lone_surrogate(text: str, path: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid(
            "A string holds a lone surrogate, which is not text.",
            param=path or None,
            code="invalid_string",
        ) from error


def _shown(key: str) -> str:
    clean = key.encode("utf-8", "replace").decode("utf-8")
    return repr(clean if len(clean) <= 64 else clean[:64] + "…")


def _bad_json(reason: str) -> ApiError:
    return invalid(f"The request body is not valid JSON: {reason}.", code="invalid_json")
