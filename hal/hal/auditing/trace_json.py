"""A trace as JSON and back: how children of an audited program hand theirs to its parent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from hal.auditing.document import Location, Machine, Refusal, Variable
from hal.auditing.trace import (
    CompileEvent,
    FunctionCall,
    Message,
    ObservedOp,
    SwallowedError,
    TensorFact,
    Trace,
)

_TENSOR: Final = "tensor fact"
_LOCATION: Final = "location"
_LISTS: Final[Mapping[str, type]] = {
    "ops": ObservedOp,
    "functions": FunctionCall,
    "messages": Message,
    "compile_events": CompileEvent,
    "swallowed": SwallowedError,
}


def trace_to_json(trace: Trace, extra: Mapping[str, Any] | None = None) -> str:
    """The whole trace. extra: further JSON values of the writer's, under "extra"."""
    document = {field.name: _encode(getattr(trace, field.name)) for field in _fields(trace)}
    return json.dumps(document | {"extra": dict(extra or {})})


def trace_from_json(text: str) -> tuple[Trace, dict[str, Any]]:
    """A trace and the writer's extra.

    Raises:
        ValueError, KeyError, TypeError: it is not what `trace_to_json` writes.
    """
    document = json.loads(text)
    extra = document.pop("extra") if isinstance(document, dict) else None
    if not isinstance(extra, dict):
        raise TypeError("a trace is an object with an extra one")
    machine = Machine.model_validate(document.pop("machine"))
    trace = Trace(machine=machine)
    for name, kind in _LISTS.items():
        setattr(trace, name, [kind(**_decode_fields(item)) for item in document.pop(name)])
    trace.variables = [Variable.model_validate(item) for item in document.pop("variables")]
    trace.refusals = [Refusal.model_validate(item) for item in document.pop("refusals")]
    places = document.pop("settings_places")
    trace.settings_places = {key: _decode(value) for key, value in places.items()}
    for name, value in document.items():
        if type(value) is not type(getattr(trace, name, None)):
            raise TypeError(f"{name} is no {type(value).__name__}")
        setattr(trace, name, value)
    return trace, extra


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _encode(value: Any) -> Any:
    if isinstance(value, TensorFact):
        return {_TENSOR: {f.name: _encode(getattr(value, f.name)) for f in _fields(value)}}
    if isinstance(value, Location):
        return {_LOCATION: [value.file, value.line, value.function]}
    if isinstance(value, Machine | Variable | Refusal):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in _fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return str(value)
    return value


def _decode_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _decode(value, name) for name, value in item.items()}


def _decode(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return _tensor(value[_TENSOR])
        if _LOCATION in value:
            file, line, function = value[_LOCATION]
            return Location(file=file, line=line, function=function)
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        items = [_decode(item) for item in value]
        return tuple(items) if name in ("inputs", "outputs", "stack") else items
    return value


def _tensor(item: Mapping[str, Any]) -> TensorFact:
    known = dict(item)
    known["shape"] = tuple(known["shape"])
    for name in ("origin_dtypes", "origin_devices"):
        known[name] = frozenset(known[name])
    return TensorFact(**known)


def merge_traces(trace: Trace, other: Trace) -> None:
    """Adds what another process observed; numbers of its function calls move up."""
    offset = len(trace.functions)
    for op in other.ops:
        if op.call is not None:
            op.call += offset
    trace.ops += other.ops
    trace.functions += other.functions
    known = set(trace.messages)
    trace.messages += [message for message in other.messages if message not in known]
    trace.steps = max(trace.steps, other.steps)
    trace.compiled += [name for name in other.compiled if name not in trace.compiled]
    for reason, calls in other.graph_breaks.items():
        trace.graph_breaks[reason] = trace.graph_breaks.get(reason, 0) + calls
    trace.fallbacks += other.fallbacks
    trace.settings.update(other.settings)
    trace.settings_places.update(other.settings_places)
    trace.compile_events += other.compile_events
    trace.variables += [v for v in other.variables if v not in trace.variables]
    trace.refusals += other.refusals
    trace.swallowed += other.swallowed
    trace.processes += other.processes
