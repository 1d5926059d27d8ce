"""What `torch.compile` did while a program was observed: compiled, broke graphs, gave up.

Dynamo counts graph breaks and keeps a record of each compilation; what it logs when it gives up is
read as well. Nothing of it is configured here.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any, Final

from hal.auditing.document import Location
from hal.auditing.observer_frames import FrameReader
from hal.auditing.trace import CompileEvent, Message, Trace

_USER_CODE: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<name>\S+))?')
_GAVE_UP: Final = re.compile(r"recompile_limit|cache_size_limit|recompilation limit", re.IGNORECASE)
_SUPPRESSED: Final = ("WON'T CONVERT", "suppress_errors")
_MAX_REASON: Final = 400
# Dynamo sometimes looks at the observer's own handler, and counts what it cannot trace there.
_OUR_BREAKS: Final = ("`time.perf_counter_ns", "`torch._C._dynamo.eval_frame.set_eval_frame")


class CompileWatch:
    """Looks at dynamo's counters and records, from the beginning of the audit on."""

    def __init__(self, frames: FrameReader) -> None:
        self._frames = frames
        self._breaks: Counter[str] = Counter()
        self._num_records = 0
        self._num_reasons = 0
        self._eager: Counter[tuple[str, Location | None]] = Counter()

    def begin(self) -> None:
        """What dynamo did before does not count."""
        module = _dynamo("torch._dynamo.utils")
        if module is not None:
            self._breaks = Counter(module.counters["graph_break"])
            self._num_records = len(_records(module))
            self._num_reasons = len(_reasons(module))

    def note_eager(self, reason: str, place: Location | None) -> None:
        """A function that was to be compiled was called, and runs as Python by what the program or
        its environment says. place: where it was given to the compiler, else the call."""
        self._eager[reason, place] += 1

    def fill(self, trace: Trace) -> None:
        """Adds what happened to the trace; reads its messages."""
        module = _dynamo("torch._dynamo.utils")
        if module is None:
            return
        breaks = Counter(module.counters["graph_break"]) - self._breaks
        for reason, calls in breaks.items():
            if any(name in reason for name in _OUR_BREAKS):
                continue
            short = _short(reason)
            trace.graph_breaks[short] = trace.graph_breaks.get(short, 0) + calls
            places = self._places_of_break(module, reason) or {self._place(reason): calls}
            trace.compile_events += [
                CompileEvent(kind="graph-break", reason=short, location=place, calls=times)
                for place, times in places.items()
            ]
        for record in _records(module)[self._num_records :]:
            self._add_record(trace, record)
        for message in list(trace.messages):
            self._add_message(trace, message)
        for (reason, place), calls in self._eager.items():
            trace.fallbacks.append(reason)
            trace.compile_events.append(
                CompileEvent(kind="eager", reason=reason, location=place, calls=calls)
            )

    def _places_of_break(self, module: Any, reason: str) -> Counter[Location | None]:
        """The lines at which dynamo broke graphs for this reason; it keeps the program's stack."""
        found: Counter[Location | None] = Counter()
        known = _reasons(module)
        begin = self._num_reasons if self._num_reasons <= len(known) else 0  # it was reset
        for entry in known[begin:]:
            stack = list(getattr(entry, "user_stack", None) or ())
            if entry.reason == reason and stack:
                last = stack[-1]
                place = self._frames.location_of_line(last.filename, last.lineno or 0, last.name)
                found[place] += 1
        return found

    def _add_record(self, trace: Trace, record: Any) -> None:
        name = getattr(record, "co_name", None)
        if not name:
            return
        place = self._frames.location_of_line(
            str(getattr(record, "co_filename", "") or "<unknown>"),
            int(getattr(record, "co_firstlineno", 0) or 0),
            name,
        )
        failure = getattr(record, "fail_reason", None)
        if not failure:
            label = f"{name} ({place})"
            if label not in trace.compiled:
                trace.compiled.append(label)
            return
        reason = _short(str(failure))
        trace.fallbacks.append(f"{name} ({place}): {reason}")
        trace.compile_events.append(
            CompileEvent(kind="eager", reason=reason, function=name, location=place)
        )

    def _add_message(self, trace: Trace, message: Message) -> None:
        if "torch._dynamo" not in message.category:
            return
        if _GAVE_UP.search(message.text):
            found = re.search(r"function: '([^']+)' \(([^)]*):(\d+)\)", message.text)
            place = message.location
            name = ""
            if found is not None:
                name = found[1]
                place = self._frames.location_of_line(found[2], int(found[3]), name)
            reason = _short(message.text)
            trace.fallbacks.append(reason)
            trace.compile_events.append(
                CompileEvent(kind="recompile-limit", reason=reason, function=name, location=place)
            )
        elif any(word in message.text for word in _SUPPRESSED):
            reason = _short(message.text)
            place = self._place(message.text) or message.location
            trace.fallbacks.append(reason)
            trace.compile_events.append(CompileEvent(kind="eager", reason=reason, location=place))

    def _place(self, text: str) -> Location | None:
        """The last line of user code that a text of dynamo's names."""
        found = list(_USER_CODE.finditer(text))
        if not found:
            return None
        last = found[-1]
        return self._frames.location_of_line(last["file"], int(last["line"]), last["name"] or "")


def _dynamo(name: str) -> Any:
    return sys.modules.get(name)


def _records(module: Any) -> list[Any]:
    get = getattr(module, "get_compilation_metrics", None)
    return list(get()) if callable(get) else []


def _reasons(module: Any) -> list[Any]:
    """Why graphs were broken, each with the program's stack."""
    return list(getattr(module, "graph_break_reasons", ()))


def _short(text: str) -> str:
    """Dynamo's reasons go on for pages: what counts is before the stack and the hints."""
    first = text.strip().split("\n  Developer debug context", 1)[0]
    return " ".join(first.split())[:_MAX_REASON]
