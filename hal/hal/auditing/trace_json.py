"""A trace as JSON and back: how children of an audited program hand theirs to its parent.

What comes back is checked as a whole, because a program can leave anything where traces are left.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from hal.auditing.trace import TensorFact, Trace

_TENSOR: Final = "tensor fact"
_ANYTHING: Final = frozenset({"arguments", "values"})
"""Fields whose values are of any type: a tensor's fact in them is marked."""


@dataclass(slots=True, kw_only=True)
class _Document:
    trace: Trace
    extra: dict[str, Any] = field(default_factory=dict)


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def trace_to_json(trace: Trace, extra: Mapping[str, Any] | None = None) -> str:
    """The whole trace. extra: further JSON values of the writer's, under "extra"."""
    return json.dumps({"trace": _encode(trace), "extra": dict(extra or {})})


def trace_from_json(text: str) -> tuple[Trace, dict[str, Any]]:
    """A trace and the writer's extra.

    Raises:
        ValueError: it is not what `trace_to_json` writes; says where, as "ops[3].calls".
    """
    try:
        document: _Document = _adapter(_Document).validate_json(text)
        trace = document.trace
        for call in trace.functions:
            call.arguments = {name: _decode(value) for name, value in call.arguments.items()}
        for op in trace.ops:
            op.values = {name: _decode(value) for name, value in op.values.items()}
    except ValidationError as error:
        raise ValueError(_first(error)) from error
    for number, op in enumerate(trace.ops):
        if op.call is not None and op.call >= len(trace.functions):
            raise ValueError(
                f"ops[{number}].call: {op.call}, and there are {len(trace.functions)} functions"
            )
    return trace, document.extra


def _first(error: ValidationError) -> str:
    """Where the first thing is wrong, and what."""
    found = error.errors(include_url=False, include_input=False)[0]
    steps = found["loc"][1:] if found["loc"][:1] == ("trace",) else found["loc"]
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return f"{place.removeprefix('.') or 'the document'}: {found['msg']}"


def _encode(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _encode_anything(getattr(value, f.name))
            if f.name in _ANYTHING
            else _encode(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _encode_anything(value: Any) -> Any:
    if isinstance(value, TensorFact):
        return {_TENSOR: _encode(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode_anything(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_anything(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _TENSOR in value:
            return _adapter(TensorFact).validate_json(json.dumps(value[_TENSOR]))
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


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
