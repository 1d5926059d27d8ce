"""The half of an audit that needs torch: modes, steps, the compiler's door. Imported with torch."""

from __future__ import annotations

import threading
from typing import Any, Literal
from weakref import WeakSet

import torch

from hal.auditing.compile_requests import CompileRequests
from hal.auditing.compile_watch import CompileWatch
from hal.auditing.generated_kernels import KernelWatch
from hal.auditing.inference_exits import InferenceExits
from hal.auditing.mode_stack import can_change, is_observing, pop_modes, push_modes
from hal.auditing.observer import Observer
from hal.auditing.observer_frames import FrameReader
from hal.auditing.observer_trace import fill_trace
from hal.auditing.script_watch import ScriptWatch
from hal.auditing.setting_places import SettingPlaces
from hal.auditing.steps import StepWatch
from hal.auditing.torch_modes import ObservedFunctions, ObservedOps
from hal.auditing.torch_modes_compile import CompilerDoor
from hal.auditing.trace import Trace


class TorchSide:
    """Observes torch in this process; threads come and go by `observe_thread`, `leave_thread`."""

    def __init__(self, frames: FrameReader, mode: Literal["full", "light"]) -> None:
        self.observer = Observer(frames)
        self._mode = mode
        self._functions = ObservedFunctions(self.observer)
        self._ops = ObservedOps(self.observer, self._functions)
        self._compile = CompileWatch(frames)
        requests = CompileRequests(frames, self._compile.note_eager)
        self._door = CompilerDoor(self.observer, self._functions, requests)
        self._kernels = KernelWatch(self.observer, self._is_thread_observed)
        self._script = ScriptWatch(self.observer)
        self._places = SettingPlaces(frames)
        self._exits = InferenceExits(self._ops)
        self._steps = StepWatch(
            self.observe_thread,
            self.leave_thread,
            self._spent_ns,
            can_change,
            is_light=mode == "light",
        )
        self._modules: WeakSet[Any] = WeakSet()
        self._module_lock = threading.Lock()

    def attach(self) -> None:
        """Observes the calling thread from now on."""
        self.observer.storages.note_existing()
        self.observer.settings.current()
        self.observer.calls.on_module = self._found_module
        self._compile.begin()
        self._script.install()
        self._door.install()
        self._kernels.install()
        self._places.install()
        self._exits.install()
        self.observer.is_active = True
        self.observe_thread()

    def dynamo_arrived(self) -> None:
        """The part of the compiler that stands at its door has been imported."""
        self._places.restore()
        self._door.install_in_dynamo()
        self._compile.begin()

    def compiler_complete(self) -> None:
        """All of the compiler has been imported."""
        self._places.install()

    def code_generator_arrived(self) -> None:
        """What loads the compiler's kernels has been imported."""
        self._kernels.install()

    def detach(self) -> None:
        """Takes everything off; modes of other threads pass everything on from now on."""
        self.observer.is_active = False
        self.leave_thread()
        self._steps.restore()
        self._door.restore()
        self._kernels.restore()
        self._places.restore()
        self._exits.restore()
        self._script.restore()
        self.observer.settings.current()
        self.observer.calls.on_module = None
        self.observer.storages.close()

    def observe_thread(self) -> None:
        """Modes on in the calling thread."""
        if not is_observing(self._ops):
            push_modes(self._ops, self._functions)

    def leave_thread(self) -> None:
        """Modes off in the calling thread."""
        if is_observing(self._ops):
            pop_modes(self._ops, self._functions)

    def forget(self) -> None:
        """After a fork: begins to count anew."""
        self._module_lock = threading.Lock()
        self._door.forget_lock()
        self.observer.forget()
        self._steps.forget()
        self._compile.begin()

    def fill(self, trace: Trace) -> None:
        """Adds what was seen."""
        fill_trace(trace, self.observer)
        trace.steps = self._steps.steps
        trace.settings_places.update(self._places.found)
        trace.settings["num_threads"] = str(torch.get_num_threads())
        self._compile.fill(trace)

    def notes(self) -> list[str]:
        """What a reader must know about how much was observed."""
        found = []
        if self._mode == "light":
            found.append(
                f"light mode: {self._steps.num_observed} of {self._steps.num_cycles} cycles of "
                "the outermost modules were observed; calls and times are theirs alone"
            )
            if not self._steps.num_cycles:
                found.append("light mode found no nn.Module to count steps by: all was observed")
        else:
            found.append("full mode: every op was observed, which makes the program slower")
        found += self._kernels.notes()
        num_masks = self.observer.calls.masks.num_passed_over
        if num_masks:
            found.append(f"{num_masks} attention masks were too many or too large to be looked at")
        for text, count in self.observer.troubles.items():
            found.append(f"the observer failed {count} times on an op: {text}")
        return found

    def _is_thread_observed(self) -> bool:
        return is_observing(self._ops)

    def _spent_ns(self) -> int:
        return self.observer.sums().overhead_ns

    def _found_module(self, module: Any) -> None:
        with self._module_lock:
            if module in self._modules:
                return
            self._modules.add(module)
        self.observer.storages.note_constants([*module.parameters(), *module.buffers()])
        self._steps.found_module(module)
