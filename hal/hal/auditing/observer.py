"""The observer: what torch's modes saw, summed per op, arguments and place, for all threads.

Each thread sums for itself, without locks; the sums become one `Trace` at the end. Nothing here
calls torch in a way that changes the program: only facts of tensors are read.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any, Final

import torch

from hal.auditing.document import Location
from hal.auditing.observer_calls import FunctionCalls
from hal.auditing.observer_facts import ArgumentFacts, FactReader
from hal.auditing.observer_frames import FrameReader, Stack
from hal.auditing.observer_ops import KernelInfo, OpInfo
from hal.auditing.observer_reuse import ReuseReader
from hal.auditing.observer_settings import SettingsReader
from hal.auditing.observer_storages import Storages
from hal.auditing.observer_sums import MAX_ENTRIES, FunctionEntry, OpEntry, ThreadSums
from hal.auditing.observer_work import bytes_of, flops_of
from hal.auditing.trace import Region

_MAX_TROUBLES: Final = 20
_MAX_ERRORS: Final = 500
_MAX_TEXT: Final = 500
_Tensor: Final = torch.Tensor
_NOTHING: Final = ArgumentFacts()


class Observer:
    """Sums of all threads of this process. `is_active` false: the modes pass everything on."""

    def __init__(self, frames: FrameReader) -> None:
        self.is_active = False
        self.frames = frames
        self.storages = Storages()
        self.facts = FactReader(self.storages)
        self.settings = SettingsReader()
        self.calls = FunctionCalls(frames, self.facts, self.settings, self.storages, self.info)
        self.threads: list[ThreadSums] = []
        self.troubles: Counter[str] = Counter()
        self.errors: Counter[tuple[str, str, str, Location | None]] = Counter()
        self.rank: int | None = None
        self._reuse = ReuseReader()
        self._local = threading.local()
        self._infos: dict[int, OpInfo] = {}

    def sums(self) -> ThreadSums:
        """The sums of the calling thread."""
        try:
            found: ThreadSums = self._local.sums
        except AttributeError:
            found = self._local.sums = ThreadSums(threading.current_thread().name)
            self.threads.append(found)
        return found

    def info(self, func: Any) -> OpInfo:
        """What is known of an op overload or a higher-order op. By id: their hash is slow, and an
        `OpInfo` keeps its own."""
        found = self._infos.get(id(func))
        if found is None:
            found = self._infos[id(func)] = OpInfo(func)
        return found

    def forget(self) -> None:
        """After a fork: what was counted until now is the parent's."""
        self.storages.forget_lock()
        self.threads.clear()
        self.errors.clear()
        self.troubles.clear()
        self.rank = None
        self._local = threading.local()

    def trouble(self, error: Exception) -> None:
        """An error of the observer's own: the program goes on, the report says so."""
        if len(self.troubles) < _MAX_TROUBLES:
            self.troubles[f"{type(error).__name__}: {error}"[:200]] += 1

    def before(self, info: OpInfo, args: Any, kwargs: Any) -> ArgumentFacts:
        """Facts of the arguments, taken before the op can change them; of a view, which changes
        nothing, none."""
        return _NOTHING if info.is_view else self.facts.read(info, args, kwargs)

    def record(
        self,
        sums: ThreadSums,
        info: OpInfo,
        before: ArgumentFacts,
        args: Any,
        kwargs: Any,
        result: Any,
        self_ns: int,
        frame: FrameType | None,
    ) -> None:
        """Counts one call that returned; one of tensors without data has computed nothing."""
        if before.is_meta or (type(result) is _Tensor and result.is_meta):
            return
        sums.num_calls += 1
        sums.last_error = 0
        frames = sums.frames
        outer = frames[-1] if frames else None
        if outer is None or outer.is_open:
            stack, region = self.frames.stack(frame)
        else:
            stack, region = outer.stack or self.calls.place(outer, frame)
        function = None
        if outer is not None:
            function = outer.entry or self.calls.entry(sums, outer, stack, frame)
        if info.is_view:
            key: Any = (info, stack, function)
        else:
            if sums.script_depth:
                region = "script"
            key = (info, before.facts, before.values, stack, function, region)
        entry = sums.ops.get(key)
        if entry is None:
            place = (stack, "script" if sums.script_depth else region, function)
            if info.is_view and _is_meta(result):
                return
            entry = self._new_entry(sums, key, info, before, place, args, kwargs, result)
            if function is None:  # else its function's entry has said so
                self.calls.announce(frame)
        entry.calls += 1
        entry.time_ns += self_ns
        if not info.is_view:
            self._follow(info, before, args, result)
            self._reuse.note(sums, entry, info, before)
        if frames:
            self.calls.count(sums, info, self_ns, frame)

    def _follow(self, info: OpInfo, before: ArgumentFacts, args: Any, result: Any) -> None:
        """Where the contents of the results come from."""
        if not (info.carries or info.makes_constants or before.written):
            return
        self.storages.note_call(
            self.facts.tensors_of(result),
            before.storages,
            before.written,
            carries=info.carries,
            constant=info.makes_constants,
            random=info.is_random,
        )
        if info.makes_literal and args:
            self.storages.note_literal(result, args[0])

    def record_kernel(
        self, name: str, tensors: list[torch.Tensor], time_ns: int, frame: FrameType | None
    ) -> None:
        """Counts one call of a kernel that the compiler generated. tensors: what it reads and
        writes; which of both, only the kernel knows."""
        sums = self.sums()
        sums.num_calls += 1
        stack, _ = self.frames.stack(frame)
        facts = tuple(self.facts.fact(tensor) for tensor in tensors)
        key = (name, facts, stack)
        entry = sums.ops.get(key)
        if entry is None:
            entry = OpEntry(KernelInfo(name), facts, (), (), stack, "compiled", None)
            entry.bytes = bytes_of(tensors, num_inputs=len(tensors))
            sums.ops[key] = entry
        entry.calls += 1
        entry.time_ns += time_ns

    def note_error(self, error: BaseException, raised_by: str, frame: FrameType | None) -> None:
        """An error leaves a call of torch. Whether the program caught it shows at the end."""
        sums = self.sums()
        if not isinstance(error, Exception) or sums.last_error == id(error):
            return
        sums.last_error = id(error)
        place = self.frames.program_location(frame)
        key = (type(error).__name__, str(error)[:_MAX_TEXT], raised_by, place)
        if key in self.errors or len(self.errors) < _MAX_ERRORS:
            self.errors[key] += 1

    def _new_entry(
        self,
        sums: ThreadSums,
        key: Any,
        info: OpInfo,
        before: ArgumentFacts,
        place: tuple[Stack, Region, FunctionEntry | None],
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> OpEntry:
        stack, region, function = place
        if len(sums.ops) >= MAX_ENTRIES:
            key = (info, stack, function, "folded")
            found = sums.ops.get(key)
            if found is not None:
                return found
        outputs = self.facts.tensors_of(result)
        facts = tuple(self.facts.fact(tensor) for tensor in outputs)
        inputs, tensors = before.facts, before.tensors
        if info.is_view:
            tensors = self.facts.tensors_of((*args, *kwargs.values()))[:1]
            inputs = tuple(self.facts.fact(tensor) for tensor in tensors)
        entry = OpEntry(info, inputs, facts, before.values, stack, region, function)
        if not info.is_view:
            entry.flops = flops_of(info.func, info.name, args, kwargs, result)
            entry.bytes = bytes_of(
                [*tensors, *outputs],
                is_gather=info.is_gather,
                is_grouped=info.is_grouped,
                num_inputs=len(tensors),
            )
        if info.is_collective:
            self.rank = _rank() if self.rank is None else self.rank
            entry.values = (*entry.values, ("backend", _backend()))
        sums.ops[key] = entry
        return entry


def _is_meta(result: Any) -> bool:
    return any(tensor.is_meta for tensor in FactReader.tensors_of(result))


def _rank() -> int | None:
    distributed = _group()
    return None if distributed is None else int(distributed.get_rank())


def _backend() -> str:
    """Of the default process group."""
    distributed = _group()
    return "" if distributed is None else str(distributed.get_backend())


def _group() -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed
