"""Rules for what was to be compiled and was not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hal.auditing.document import Location
from hal.auditing.gates import GateClass
from hal.auditing.rules.rule import Hit, Rule, evidence
from hal.auditing.rules.trace_index import TraceIndex
from hal.auditing.trace import CompileEvent

MAX_REASON = 160

_FOREIGN = re.compile(r"/torch/_(?:dynamo|inductor|functorch)/|hal/auditing/")
_USER_CODE = re.compile(r'File "([^"]+)", line (\d+)')


def _first_line(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return (lines[0] if lines else "no reason given")[:MAX_REASON]


def _hit(event: CompileEvent, title: str, required: str) -> Hit:
    return Hit(
        title=title,
        location=event.location,
        op="other",
        evidence=(
            evidence(event.function or "compiled function", required, _first_line(event.reason)),
        ),
        calls=event.calls,
    )


def _events(index: TraceIndex) -> list[CompileEvent]:
    """Those of the program: torch reports frames of its own as well, and the observer's."""
    return [
        event
        for event in index.trace.compile_events
        if event.location is None or not _FOREIGN.search(event.location.file)
    ]


def _eager(index: TraceIndex) -> Iterator[Hit]:
    events = [event for event in _events(index) if event.kind != "graph-break"]
    for event in events:
        is_limit = event.kind == "recompile-limit"
        why = "compiled again too often" if is_limit else _first_line(event.reason)
        title = f"{event.function or 'a function'} was to be compiled and ran as Python: {why}"
        yield _hit(event, title, "compiled code")
    # Fallbacks are the same without places.
    for reason in [] if events else index.trace.fallbacks:
        yield _hit(
            CompileEvent(kind="eager", reason=reason),
            f"was to be compiled and ran as Python: {_first_line(reason)}",
            "compiled code",
        )


def _graph_breaks(index: TraceIndex) -> Iterator[Hit]:
    events = [event for event in _events(index) if event.kind == "graph-break"]
    for event in events:
        title = f"a compiled function is cut in two: {_first_line(event.reason)}"
        place = event.location or _place_in_messages(index)
        yield _hit(replace(event, location=place), title, "one graph")
    if events:
        return
    for reason, count in index.trace.graph_breaks.items():
        yield _hit(
            CompileEvent(kind="graph-break", reason=reason, calls=count),
            f"a compiled function is cut in two: {_first_line(reason)}",
            "one graph",
        )


def _place_in_messages(index: TraceIndex) -> Location | None:
    """The line of the program that the compiler's own warnings of a graph break name, if it is
    one: what it counts has no places."""
    files = {op.location.file for op in index.trace.ops if op.location is not None}
    found: set[tuple[str, int]] = set()
    for message in index.trace.messages:
        places = _USER_CODE.findall(message.text) if "raph break" in message.text else []
        if places:
            file, line = places[-1]
            shown = next((known for known in files if file.endswith(known)), file)
            found.add((shown, int(line)))
    if len(found) != 1:
        return None
    file, number = found.pop()
    return Location(file=file, line=number)


RULES = (
    Rule(
        id="eager-instead-of-compiled",
        gate=GateClass.LOST_FAST_PATH,
        summary="a function given to torch.compile that ran as Python, or was compiled again "
        "until torch gave up",
        remedy="remove what switches the compiler off (TORCH_COMPILE_DISABLE, suppress_errors, "
        "backend='eager'); mark varying sizes dynamic",
        check=_eager,
    ),
    Rule(
        id="graph-break",
        gate=GateClass.LOST_FAST_PATH,
        summary="a compiled function that torch had to cut into several graphs",
        remedy="move what breaks the graph (print, item, numpy, foreign calls) out of it; "
        "torch.compile(fullgraph=True) makes it an error",
        check=_graph_breaks,
    ),
)
