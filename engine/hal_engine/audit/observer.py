"""Watches and times the calls of one rank's bound ops, each with its size.

A call is timed or watched, never both: watching looks at every torch op and every Python function
inside and costs many times the kernel. The bound ops' own counters count all of them.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from types import FrameType
from typing import Any

import torch

from hal.auditing.document import Location
from hal.binding import Binding, BoundOp
from hal.candidates import Kernel
from hal.loaded_code import LoadedCode
from hal.plan import PlannedOp
from hal_engine.audit.call_work import CallSize, size_of
from hal_engine.audit.inspecting import InspectedSite, Inspector
from hal_engine.audit.leaf_checks import CallEvidence, LeafTally

# What is done with calls at the moment. Plain numbers: each call of a bound op asks.
_NOTHING, _TIMING, _WATCHING = range(3)


@dataclass(slots=True)
class Timing:
    calls: int = 0
    ns: int = 0


@dataclass(slots=True, kw_only=True)
class SiteRecord:
    """What was seen of one call site and token range.

    timed: by size. watched: calls by size. ops: torch ops inside watched calls. host_ops: reads by
    the host and copies between devices inside them, with the line. arguments: of the first call.
    """

    site: str
    planned: PlannedOp
    code: tuple[LoadedCode, ...]
    tally: LeafTally
    timed: dict[CallSize, Timing] = field(default_factory=dict)
    watched: Counter[CallSize] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    host_ops: Counter[tuple[str, Location]] = field(default_factory=Counter)
    arguments: str = ""

    def copy(self) -> SiteRecord:
        """One that further calls do not change."""
        return replace(
            self,
            tally=self.tally.copy(),
            timed={size: replace(timing) for size, timing in self.timed.items()},
            watched=self.watched.copy(),
            ops=self.ops.copy(),
            host_ops=self.host_ops.copy(),
        )

    @property
    def num_timed(self) -> int:
        return sum(timing.calls for timing in self.timed.values())

    @property
    def num_watched(self) -> int:
        return self.watched.total()


class CallObserver:
    """Give `observe` to `BoundOps`; say with `timing()` and `watching()` what happens to calls."""

    def __init__(self, inspector: Inspector | None = None) -> None:
        self.records: list[SiteRecord] = []
        self.inspector = inspector
        self.evidence: CallEvidence | None = None  # of the watched call that runs now
        self.record: SiteRecord | None = None
        self.is_paused = False  # what runs is our own doing
        self._looking = _NOTHING
        self._lock = threading.Lock()

    @property
    def is_looking(self) -> bool:
        """Whether calls that are made now are timed or watched."""
        return self._looking != _NOTHING

    def observe(self, binding: Binding, kernel: Kernel) -> BoundOp:
        """The call of one site and range, as `BoundOps` wants it."""
        choice = binding.planned.choice
        record = SiteRecord(
            site=binding.site,
            planned=binding.planned,
            code=binding.code,
            tally=LeafTally(choice.leaf, binding.code),
        )
        self.records.append(record)
        inspected = None if self.inspector is None else self.inspector.prepare(binding)
        request = binding.planned.site.request

        def call(num_tokens: int, *args: Any) -> Any:
            looking = self._looking
            if not looking or self.is_paused:
                return kernel(*args)
            if looking == _WATCHING:
                return self._watch(record, inspected, kernel, num_tokens, args)
            size = size_of(request, num_tokens, args)
            begin = perf_counter_ns()
            result = kernel(*args)
            self._add(record, size, perf_counter_ns() - begin)
            return result

        return call

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Calls meanwhile are timed."""
        yield from self._while(_TIMING)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls meanwhile are watched."""
        yield from self._while(_WATCHING)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs meanwhile is the audit's own and not observed."""
        before, self.is_paused = self.is_paused, True
        try:
            with torch._C._DisableTorchDispatch():
                yield
        finally:
            self.is_paused = before

    def snapshot(self) -> CallObserver:
        """A copy of what was seen so far, taken between two calls."""
        copy = CallObserver(self.inspector)
        with self._lock:
            copy.records = [record.copy() for record in self.records]
        return copy

    def _while(self, looking: int) -> Iterator[None]:
        before, self._looking = self._looking, looking
        try:
            yield
        finally:
            self._looking = before

    def _add(self, record: SiteRecord, size: CallSize, ns: int) -> None:
        with self._lock:
            timing = record.timed.get(size)
            if timing is None:
                timing = record.timed[size] = Timing()
            timing.calls += 1
            timing.ns += ns

    def _watch(
        self,
        record: SiteRecord,
        inspected: InspectedSite | None,
        kernel: Kernel,
        num_tokens: int,
        args: Sequence[Any],
    ) -> Any:
        with self.paused():
            size = size_of(record.planned.site.request, num_tokens, args)
            record.arguments = record.arguments or describe_arguments(args)
            held = None
            if self.inspector is not None and inspected is not None:
                held = self.inspector.before(inspected, args)
        evidence = CallEvidence()
        outer = self.evidence, self.record
        self.evidence, self.record = evidence, record
        entries = [code.entries() for code in record.code]
        try:
            if record.tally.needs_python:
                result = _profiled(kernel, args, evidence.modules)
            else:
                result = kernel(*args)
        finally:
            self.evidence, self.record = outer
        for code, before in zip(record.code, entries, strict=True):
            if (count := code.entries() - before) > 0:
                evidence.entered[code.symbol] += count
        with self._lock:
            record.watched[size] += 1
            record.ops.update(evidence.ops)
            record.tally.add(evidence, lambda: f"{num_tokens} tokens, {describe_arguments(args)}")
        if self.inspector is not None and held is not None:
            with self.paused():
                self.inspector.after(held, args, result)
        return result


def _profiled(kernel: Kernel, args: Sequence[Any], modules: set[str]) -> Any:
    """Calls the kernel and notes the modules whose Python functions are entered meanwhile."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            modules.add(str(frame.f_globals.get("__name__", "")))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return kernel(*args)
    finally:
        sys.setprofile(before)


def describe_arguments(args: Sequence[Any]) -> str:
    """Shapes and dtypes, short: "f32[8,576] f32[8,576]"."""
    return " ".join(_describe(arg) for arg in args if isinstance(arg, torch.Tensor | tuple))


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def _describe(arg: Any) -> str:
    if isinstance(arg, tuple):
        return describe_arguments(arg)
    name = str(arg.dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return f"{_SHORT.get(stem, stem)}{name[len(stem) :]}{list(arg.shape)}".replace(" ", "")


def caller_location(skip: Callable[[str], bool]) -> Location:
    """The innermost frame whose file `skip` does not say to pass over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not skip(frame.f_code.co_filename):
            return Location(
                file=frame.f_code.co_filename,
                line=frame.f_lineno,
                function=frame.f_code.co_qualname if sys.version_info >= (3, 11) else "",
            )
        frame = frame.f_back
    return Location(file="unknown", line=0)
