"""Says where in a file an entry is wrong: pydantic's finding with its line, key and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hal.suggestions import did_you_mean
from hal_capability_db.errors import DatabaseError
from hal_capability_db.located import LocatedList, LocatedMap, Place, refusal

_SHOWN = 80


def entry_faults(
    error: ValidationError, raw: LocatedMap, model: type[BaseModel], key: str
) -> list[DatabaseError]:
    """Every finding about one entry. `key` is the entry's own, as in `devices.rtx-4090`."""
    found = error.errors(include_url=False)
    return [_fault(details, raw, model, key) for details in found]


def shown(value: object) -> str:
    """A value as the file spells it, shortened."""
    constants = {None: "null", True: "true", False: "false"}
    if isinstance(value, bool) or value is None:
        return constants[value]
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} items"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _fault(
    details: ErrorDetails, raw: LocatedMap, model: type[BaseModel], key: str
) -> DatabaseError:
    context = details.get("ctx", {})
    location = tuple(details["loc"]) + tuple(context.get("path", ()))
    place, path = _locate(raw, location)
    dotted = ".".join([key, *path])
    last = str(location[-1]) if location else ""
    kind = details["type"]
    parent = _model_at(model, location[:-1])
    if kind == "extra_forbidden":
        known = parent.model_fields if parent is not None else ()
        found = f"the unknown key {last!r}"
        return refusal(place, dotted, "a known key", found, did_you_mean(last, known))
    if kind == "missing":
        remedy = f"add it{_meaning(parent, last)}"
        return refusal(place, dotted, f"the key {last!r}", "nothing", remedy)
    meaning = _meaning(_model_at(model, location[:-1]), last)
    if kind == "fault":
        required, found = str(context["required"]), str(context["found"])[: 2 * _SHOWN]
        return refusal(place, dotted, required, found, f"correct it{meaning}")
    required = details["msg"].removeprefix("Input should be ")
    if kind == "literal_error" and isinstance(details["input"], str):
        remedy = did_you_mean(details["input"], _literals(str(context.get("expected", ""))))
        return refusal(place, dotted, required, shown(details["input"]), remedy)
    return refusal(place, dotted, required, shown(details["input"]), f"correct it{meaning}")


def _meaning(parent: type[BaseModel] | None, key: str) -> str:
    field = parent.model_fields.get(key) if parent is not None else None
    return f": {field.description}" if field is not None and field.description else ""


def _literals(expected: str) -> list[str]:
    return [part.strip(" '") for part in expected.replace(" or ", ", ").split(",")]


def _locate(raw: LocatedMap, location: Sequence[str | int]) -> tuple[Place, list[str]]:
    """The place of the innermost part of `location` that the file has, and the dotted path."""
    value: Any = raw
    place = raw.place
    path: list[str] = []
    for part in location:
        if part == "[key]":
            continue
        path.append(str(part))
        if isinstance(value, LocatedMap) and part in value:
            place, value = value.places[str(part)], value[str(part)]
        elif isinstance(value, LocatedList) and isinstance(part, int) and part < len(value):
            place, value = value.places[part], value[part]
        else:
            value = None
    return place, path


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    """The model that judges the mapping at `location`, None if no model does."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part) if current is not None else None
        current = _model_in(field.annotation) if field is not None else None
    return current


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
