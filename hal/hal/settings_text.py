"""Turn the text of a variable or an option into the plain value that its field wants."""

import json
import re
import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def text_to_value(annotation: Any, text: str) -> Any:
    """A JSON-like value for a field of that type; the text itself if nothing fits.

    Lists may be written as JSON or with commas, mappings as JSON or as `key=value` with commas.
    Validation is left to the field's model: what does not fit stays as it is.
    """
    annotation = _plain(annotation)
    if annotation is bool:
        return _to_bool(text)
    if annotation is int and _INTEGER.fullmatch(text):
        return int(text)
    if annotation is float:
        return _to_float(text)
    if get_origin(annotation) is Literal:
        by_text = {str(choice): choice for choice in get_args(annotation)}
        return by_text.get(text, text)
    if _is_mapping(annotation):
        return _to_mapping(text)
    if _is_sequence(annotation):
        return _to_list(annotation, text)
    return text


def _is_sequence(annotation: Any) -> bool:
    """Whether a field holds several values."""
    origin = get_origin(_plain(annotation))
    return isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet)


def _is_mapping(annotation: Any) -> bool:
    """Whether a field holds values by key."""
    origin = get_origin(_plain(annotation))
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _plain(annotation: Any) -> Any:
    """The type without `Annotated` and without `| None`."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            inner = [part for part in get_args(annotation) if part is not type(None)]
            if len(inner) != 1:
                return annotation
            annotation = inner[0]
        else:
            return annotation


def _to_bool(text: str) -> bool | str:
    folded = text.casefold()
    if folded in _TRUE:
        return True
    return False if folded in _FALSE else text


def _to_float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _to_list(annotation: Any, text: str) -> Any:
    if text.lstrip().startswith("["):
        return _json(text)
    arguments = get_args(_plain(annotation))
    inner = arguments[0] if arguments else str
    return [text_to_value(inner, part.strip()) for part in text.split(",") if part.strip()]


def _to_mapping(text: str) -> Any:
    if text.lstrip().startswith("{"):
        return _json(text)
    result: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip() or key.strip() in result:
            return text
        result[key.strip()] = value.strip()
    return result


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
