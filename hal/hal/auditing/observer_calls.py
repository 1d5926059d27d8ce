"""Calls of torch functions while they run: which entry each counts in, and what ran inside."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hal.auditing.observer_facts import FactReader
from hal.auditing.observer_frames import FrameReader, Stack
from hal.auditing.observer_functions import FunctionReader
from hal.auditing.observer_masks import MaskReader
from hal.auditing.observer_ops import OpInfo
from hal.auditing.observer_settings import SettingsReader
from hal.auditing.observer_storages import Storages
from hal.auditing.observer_sums import (
    MAX_ENTRIES,
    FunctionEntry,
    FunctionFrame,
    OpEntry,
    ThreadSums,
)
from hal.auditing.op_classes import FUSED_ATTENTION
from hal.auditing.trace import Region


class FunctionCalls:
    """Functions of torch that the program calls."""

    def __init__(
        self,
        frames: FrameReader,
        facts: FactReader,
        settings: SettingsReader,
        storages: Storages,
        info: Callable[[Any], OpInfo],
    ) -> None:
        self.on_module: Any = None  # told of the outermost nn.Module around a new entry
        self.masks = MaskReader(storages)
        self.reader = FunctionReader(facts, self.masks)
        self._frames = frames
        self._facts = facts
        self._settings = settings
        self._info = info
        self._paths: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()

    def enter(self, sums: ThreadSums, func: Any, args: Any, kwargs: Any) -> FunctionFrame:
        """A torch function of the program begins."""
        sums.last_error = 0  # an error of before is over, and its id may be used again
        # Read now: autocast is off within the function, whose arguments it has cast.
        frame = FunctionFrame(func, args, kwargs, self._settings.current())
        sums.frames.append(frame)
        return frame

    def count(self, sums: ThreadSums, info: OpInfo, self_ns: int, frame: FrameType | None) -> None:
        """An op ran within all functions that are running."""
        is_fused = info.name in FUSED_ATTENTION
        for running in sums.frames:
            running.children_ns += self_ns
            if info.is_view:
                continue
            running.num_ops += 1
            running.num_fused += is_fused
            entry = running.entry
            if entry is None:
                stack, _ = running.stack or self.place(running, frame)
                entry = self.entry(sums, running, stack, frame)
            entry.leaves[info.name] = entry.leaves.get(info.name, 0) + 1

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
        if running.entry is None and self.reader.name(running.func).startswith("_"):
            return
        stack, region = running.stack or self.place(running, frame)
        entry = running.entry or self.entry(sums, running, stack, frame)
        entry.calls += 1
        entry.time_ns += total_ns
        is_math = running.num_ops and not running.num_fused
        if is_math and entry.is_attention and region == "eager":
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
        info = self._info(torch.ops.aten._scaled_dot_product_attention_math.default)
        inputs = tuple(value[1] for _, value in entry.arguments if value[0] == "tensor")
        values = tuple((name, value[1]) for name, value in entry.arguments if value[0] == "value")
        key = (info, entry)
        found = sums.ops.get(key)
        if found is None:
            outputs = tuple(self._facts.fact(tensor) for tensor in self._facts.tensors_of(result))
            found = OpEntry(info, inputs, outputs, values, entry.stack, "eager", entry)
            sums.ops[key] = found
        found.calls += 1
        found.time_ns += self_ns
        entry.leaves[info.name] = entry.leaves.get(info.name, 0) + 1
        for outer in sums.frames[:-1]:
            outer.num_fused += 1
            if outer.entry is not None:
                leaves = outer.entry.leaves
                leaves[info.name] = leaves.get(info.name, 0) + 1

    def place(self, running: FunctionFrame, frame: FrameType | None) -> tuple[Stack, Region]:
        """Where a function was called: the same for all ops within it, but for one that runs code
        of the program."""
        found = self._frames.stack(frame)
        if not running.is_open:
            running.stack = found
        return found

    def entry(
        self, sums: ThreadSums, running: FunctionFrame, stack: Stack, frame: FrameType | None
    ) -> FunctionEntry:
        """The entry of a function that runs, found at its first op."""
        key = (
            stack,
            running.settings,
            *self.reader.key(running.func, running.args, running.kwargs),
        )
        entry = sums.function_calls.get(key)
        if entry is None:
            entry = self._named_entry(sums, running, stack, frame)
            if len(sums.function_calls) < MAX_ENTRIES:
                sums.function_calls[key] = entry
        running.entry = entry
        return entry

    def _named_entry(
        self, sums: ThreadSums, running: FunctionFrame, stack: Stack, frame: FrameType | None
    ) -> FunctionEntry:
        name = self.reader.name(running.func)
        arguments = self.reader.arguments(running.func, running.args, running.kwargs)
        key: Any = (name, arguments, stack, running.settings)
        entry = sums.functions.get(key)
        if entry is None and len(sums.functions) >= MAX_ENTRIES:
            key = (name, None, stack, None)
            entry = sums.functions.get(key)
        if entry is None:
            module = self._module_name(frame)
            entry = FunctionEntry(name, arguments, stack, running.settings, module)
            sums.functions[key] = entry
        return entry

    def _module_name(self, frame: FrameType | None) -> str:
        modules = self._frames.modules(frame)
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

    def announce(self, frame: FrameType | None) -> None:
        """Tells of the outermost module around a frame."""
        modules = self._frames.modules(frame)
        if modules:
            self._announce(modules[-1])

    def _announce(self, module: Any) -> None:
        if self.on_module is not None:
            self.on_module(module)
