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
from weakref import WeakKeyDictionary

import torch

from hal.auditing.document import Location
from hal.auditing.observer_facts import ArgumentFacts, FactReader
from hal.auditing.observer_frames import FrameReader, Stack
from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_settings import SettingsReader
from hal.auditing.observer_storages import StorageFacts, Storages
from hal.auditing.observer_sums import FunctionEntry, FunctionFrame, OpEntry, ThreadSums
from hal.auditing.observer_work import bytes_of, flops_of
from hal.auditing.op_classes import FUSED_ATTENTION
from hal.auditing.trace import Region

_MAX_SEEN_CALLS: Final = 200_000
_MAX_ENTRIES: Final = 50_000
_MAX_TROUBLES: Final = 20
_MAX_ERRORS: Final = 500
_MAX_TEXT: Final = 500
_MAX_PRODUCTS_BETWEEN: Final = 6
_PRODUCTS: Final = frozenset({"gemm", "convolution", "attention"})


class Observer:
    """Sums of all threads of this process. `is_active` false: the modes pass everything on."""

    def __init__(self, frames: FrameReader) -> None:
        self.is_active = False
        self.frames = frames
        self.storages = Storages()
        self.facts = FactReader(self.storages)
        self.settings = SettingsReader()
        self.threads: list[ThreadSums] = []
        self.troubles: Counter[str] = Counter()
        self.errors: Counter[tuple[str, str, str, Location | None]] = Counter()
        self.rank: int | None = None
        self.on_module: Any = None  # told of the outermost nn.Module around a new entry
        self._local = threading.local()
        self._infos: dict[Any, OpInfo] = {}
        self._seen_calls: dict[int, None] = {}
        self._paths: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def sums(self) -> ThreadSums:
        """The sums of the calling thread."""
        try:
            found: ThreadSums = self._local.sums
        except AttributeError:
            found = self._local.sums = ThreadSums(threading.current_thread().name)
            self.threads.append(found)
        return found

    def info(self, func: Any) -> OpInfo:
        """What is known of an op overload or a higher-order op."""
        found = self._infos.get(func)
        if found is None:
            found = self._infos[func] = OpInfo(func)
        return found

    def forget(self) -> None:
        """After a fork: what was counted until now is the parent's."""
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
        """Facts of the arguments, taken before the op can change them."""
        return self.facts.read(info, args, kwargs)

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
        """Counts one call that returned."""
        sums.num_calls += 1
        sums.last_error = 0
        outer = sums.frames[-1] if sums.frames else None
        stack, region = self._place(outer, frame)
        if sums.script_depth:
            region = "script"
        function = self._function(sums, outer, stack, frame)
        if info.is_view:
            key: Any = (info, stack, function)
        else:
            key = (info, before.keys, before.values, stack, function, region)
        entry = sums.ops.get(key)
        outputs = self.facts.tensors_of(result)
        if not info.is_view:
            self._trace_origins(info, before, outputs)
            if info.makes_literal and args:
                self.storages.note_literal(outputs[0], args[0])
        if entry is None:
            entry = self._new_entry(
                sums, key, info, before, outputs, (stack, region, function), args, kwargs, result
            )
            if function is None:  # else its function's entry has said so
                self._announce_module(frame)
        entry.calls += 1
        entry.time_ns += self_ns
        is_repeat = before.identity is not None and self._is_repeat(before.identity)
        entry.repeats += is_repeat
        if not info.is_view:
            self._note_sharing(sums, entry, info, before, is_repeat=is_repeat)
        self._count_in_functions(sums, info, self_ns, frame)

    def _note_sharing(
        self,
        sums: ThreadSums,
        entry: OpEntry,
        info: OpInfo,
        before: ArgumentFacts,
        *,
        is_repeat: bool,
    ) -> None:
        """Whether a call goes on with the tensor of the one before from its place. Layers that all
        read one tensor (an encoder's result) have more products between them than a loop has."""
        sums.num_products += info.op_class in _PRODUCTS
        if before.first_variable is None:
            return
        place = (info, entry.stack)
        last = sums.last_storage.get(place)
        sums.last_storage[place] = (before.first_variable, sums.num_products)
        if last is None or is_repeat or last[0] != before.first_variable:
            return
        entry.shared_inputs += sums.num_products - last[1] <= _MAX_PRODUCTS_BETWEEN

    def enter(self, sums: ThreadSums, func: Any, args: Any, kwargs: Any) -> FunctionFrame:
        """A torch function of the program begins."""
        sums.last_error = 0  # an error of before is over, and its id may be used again
        # Read now: autocast is off within the function, whose arguments it has cast.
        frame = FunctionFrame(func, args, kwargs, self.settings.current())
        sums.frames.append(frame)
        return frame

    def _count_in_functions(
        self, sums: ThreadSums, info: OpInfo, self_ns: int, frame: FrameType | None
    ) -> None:
        is_fused = info.name in FUSED_ATTENTION
        for running in sums.frames:
            running.children_ns += self_ns
            if info.is_view:
                continue
            running.num_ops += 1
            running.num_fused += is_fused
            stack, _ = self._place(running, frame)
            entry = self._function(sums, running, stack, frame)
            if entry is not None:
                entry.leaves[info.name] += 1

    def leave(
        self,
        sums: ThreadSums,
        running: FunctionFrame,
        total_ns: int,
        result: Any,
        frame: FrameType | None,
    ) -> None:
        """It ended. total_ns: its time without that of observing. A private function in which
        nothing ran is torch's own bookkeeping."""
        if running.entry is None and self.facts.function_name(running.func).startswith("_"):
            return
        stack, region = self._place(running, frame)
        entry = self._function(sums, running, stack, frame)
        if entry is None:
            return
        entry.calls += 1
        entry.time_ns += total_ns
        is_math = running.num_ops and not running.num_fused
        if is_math and entry.name == "scaled_dot_product_attention" and region == "eager":
            self._note_math(sums, running, entry, result, max(total_ns - running.children_ns, 0))

    def _note_math(
        self,
        sums: ThreadSums,
        running: FunctionFrame,
        entry: FunctionEntry,
        result: Any,
        self_ns: int,
    ) -> None:
        """Above autograd torch's math path shows its parts only: the whole is added, with the time
        that none of them took."""
        info = self.info(torch.ops.aten._scaled_dot_product_attention_math.default)
        inputs = tuple(value[1] for _, value in entry.arguments if value[0] == "tensor")
        values = tuple((name, value[1]) for name, value in entry.arguments if value[0] == "value")
        key = (info, entry)
        found = sums.ops.get(key)
        if found is None:
            outputs = tuple(self.facts.key(tensor)[0] for tensor in self.facts.tensors_of(result))
            found = OpEntry(info, inputs, outputs, values, entry.stack, "eager", entry)
            sums.ops[key] = found
        found.calls += 1
        found.time_ns += self_ns
        entry.leaves[info.name] += 1
        for outer in sums.frames[:-1]:
            outer.num_fused += 1
            if outer.entry is not None:
                outer.entry.leaves[info.name] += 1

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

    def _place(self, outer: FunctionFrame | None, frame: FrameType | None) -> tuple[Stack, Region]:
        if outer is None or outer.is_open:
            return self.frames.stack(frame)
        if outer.stack is None:
            outer.stack = self.frames.stack(frame)
        return outer.stack

    def _function(
        self,
        sums: ThreadSums,
        outer: FunctionFrame | None,
        stack: Stack,
        frame: FrameType | None,
    ) -> FunctionEntry | None:
        """The entry of the function that runs, made at its first op."""
        if outer is None:
            return None
        if outer.entry is None:
            name, arguments = self.facts.arguments_of(outer.func, outer.args, outer.kwargs)
            settings = outer.settings
            key: Any = (name, arguments, stack, settings)
            entry = sums.functions.get(key)
            if entry is None:
                if len(sums.functions) >= _MAX_ENTRIES:
                    key = (name, None, stack, None)
                    entry = sums.functions.get(key)
                if entry is None:
                    arguments = self.facts.with_patterns(outer.func, name, outer, arguments)
                    module = self._module_name(frame)
                    entry = FunctionEntry(name, arguments, stack, settings, module)
                    sums.functions[key] = entry
            outer.entry = entry
        return outer.entry

    def _new_entry(
        self,
        sums: ThreadSums,
        key: Any,
        info: OpInfo,
        before: ArgumentFacts,
        outputs: list[torch.Tensor],
        place: tuple[Stack, Region, FunctionEntry | None],
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> OpEntry:
        stack, region, function = place
        if len(sums.ops) >= _MAX_ENTRIES:
            key = (info, stack, function, "folded")
            found = sums.ops.get(key)
            if found is not None:
                return found
        facts = tuple(self.facts.key(tensor)[0] for tensor in outputs)
        entry = OpEntry(info, before.keys, facts, before.values, stack, region, function)
        if not info.is_view:
            entry.flops = flops_of(info.func, info.name, args, kwargs, result)
            entry.bytes = bytes_of(
                [*before.tensors, *outputs],
                is_gather=info.is_gather,
                is_grouped=info.is_grouped,
                num_inputs=len(before.tensors),
            )
        if info.is_collective:
            self.rank = _rank() if self.rank is None else self.rank
            entry.values = (*entry.values, ("backend", _backend()))
        sums.ops[key] = entry
        return entry

    def _trace_origins(
        self, info: OpInfo, before: ArgumentFacts, outputs: list[torch.Tensor]
    ) -> None:
        sources: list[StorageFacts] = before.storages
        written = {facts.uid for facts in before.written}
        for facts in before.written:
            self.storages.note_write(
                facts, sources, carries=info.carries, constant=not info.is_random
            )
        for tensor in outputs:
            made = self.storages.of(tensor)
            if made is None or made.uid in written:
                continue
            if any(made is source for source in sources):
                continue  # the input itself, or a view of it
            self.storages.note_result(
                tensor, sources, carries=info.carries, constant=info.makes_constants
            )

    def _is_repeat(self, identity: int) -> bool:
        seen = self._seen_calls
        if identity in seen:
            return True
        if len(seen) >= _MAX_SEEN_CALLS:
            for old in list(seen)[: _MAX_SEEN_CALLS // 2]:
                seen.pop(old, None)
        seen[identity] = None
        return False

    def _module_name(self, frame: FrameType | None) -> str:
        modules = self.frames.modules(frame)
        if not modules:
            return ""
        self._announce(modules[-1])
        name = self._path_of(modules[0], modules[-1])
        kind = type(modules[0]).__name__
        return f"{name} ({kind})" if name else kind

    def _path_of(self, module: Any, root: Any) -> str:
        """Dotted path of a module in the outermost one."""
        known = self._paths.get(root)
        if known is None or id(module) not in known:
            known = {id(part): name for name, part in root.named_modules()}
            self._paths[root] = known
        return known.get(id(module), "")

    def _announce_module(self, frame: FrameType | None) -> None:
        modules = self.frames.modules(frame)
        if modules:
            self._announce(modules[-1])

    def _announce(self, module: Any) -> None:
        if self.on_module is not None:
            self.on_module(module)


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
