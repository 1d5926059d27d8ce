"""Captures what a step launches on the CPU, and runs it again as one call.

A decode step of a small model is hundreds of launches of a few microseconds; called one by one from
Python, what lies between them costs as much as the small ones themselves. A captured step is the
list of its launches, with the addresses that they had: the replay is one call into machine code.
What CUDA graphs are on a GPU.

A capture holds for the memory that the step was given: who replays writes the inputs into the same
tensors. It is refused where an op of torch computes or reads a value, or a launch is given an
address that nothing keeps alive. What reads through an address of its own (ctypes) is not seen:
whoever says that an implementation is safe to capture answers for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hal.errors import CaptureError
from hal_kernels.cpu_fault import check_all
from hal_kernels.cpu_launch_memory import relocate_launch
from hal_kernels.cpu_memory_plan import ALIGNMENT
from hal_kernels.cpu_recording import Recording, recorded_launches
from hal_kernels.cpu_sequence import SEQUENCE_WORDS, fill_sequence, sequence_call
from hal_kernels.cpu_step_memory import StepMemory

# Ops that make memory and write none of it.
_MAKING = frozenset({"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like"})
# Methods that hand a tensor's values to Python or to another library without an op of torch.
_READING = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


class SharedMemory:
    """Memory for the intermediate tensors of captures that are never replayed at the same time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes, aligned to a cache line. Captures that were made with less keep
        what they have."""
        if self._memory.numel() < num_bytes + ALIGNMENT:
            most = max(num_bytes, 2 * self._memory.numel()) + ALIGNMENT
            self._memory = torch.empty(most, dtype=torch.uint8)
        start = -self._memory.data_ptr() % ALIGNMENT
        return self._memory[start:]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """See `hal.hookspecs.CapturedStep`."""

    output: torch.Tensor
    replay: Callable[[], None]
    num_launches: int


def capture(
    step: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor], shared: SharedMemory
) -> CapturedStep:
    """Runs `step` once and returns the replay of it.

    inputs: what the step reads and writes beside the tensors that it makes and what its kernels
    hold: the tensors that a replay finds new values in, and caches. The step's result, and that of
    each replay, is in `output` until the next capture or replay with the same `shared`.

    Raises CaptureError, after the step ran, if it cannot be replayed; what the step raises.
    """
    inputs = tuple(inputs)
    with recorded_launches() as recording:
        for tensor in inputs:
            recording.add_memory(tensor, is_kept=True)
        with _LaunchesOnly(recording) as seen, _NothingRead(seen.computing):
            result = step()
    if not result.is_contiguous():
        raise CaptureError(
            "capture of a step on the CPU",
            "a contiguous result",
            f"{list(result.shape)} with strides {list(result.stride())}",
            "run the step call by call",
        )
    if seen.computing:
        name, calls = next(iter(seen.computing.items()))
        raise CaptureError(
            "capture of a step on the CPU",
            "launches of compiled kernels only",
            f"{name}, called {calls} times" if calls > 1 else name,
            "run the step call by call; is_graph_safe of the implementation that calls it says "
            "more than it keeps",
        )
    memory = StepMemory(recording, result)
    arena = shared.take(memory.num_bytes)
    return _program(recording, memory, arena, result, inputs)


class _LaunchesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Records what memory torch makes meanwhile, and notes the ops that compute: name -> calls.

    It keeps no tensor: a step that is captured takes no more memory than one that is called.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._recording = recording
        self.computing: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _MAKING:
            self._recording.add_memory(result, is_kept=False)
        elif not func.is_view:
            self.computing[name] = self.computing.get(name, 0) + 1
        return result


class _NothingRead(TorchFunctionMode):
    """Notes the methods by which values leave torch unseen by its dispatcher: name -> calls."""

    def __init__(self, seen: dict[str, int]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING:
            name = f"Tensor.{name}"
            self._seen[name] = self._seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _program(
    recording: Recording,
    memory: StepMemory,
    arena: torch.Tensor,
    result: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
) -> CapturedStep:
    """The launches with their addresses in `arena`, as one sequence."""
    launches, address = recording.launches, arena.data_ptr()
    num_words = SEQUENCE_WORDS + len(launches) + sum(len(launch.words) for launch in launches)
    words = (ctypes.c_int64 * num_words)()
    start, starts = SEQUENCE_WORDS + len(launches), []
    for number, launch in enumerate(launches):
        words[start : start + len(launch.words)] = list(launch.words)
        for index in launch.addresses or ():
            if launch.words[index]:
                words[start + index] = memory.moved(number, index, launch.words[index], address)
        starts.append(relocate_launch(words, start))
        start += len(launch.words)
    fill_sequence(words, starts)
    begin = memory.moved_result(result.data_ptr(), address) - address
    if 0 <= begin < arena.numel():
        flat = arena[begin : begin + result.numel() * result.element_size()]
        output = flat.view(result.dtype).view(result.shape)
        output.copy_(result)
    else:
        output = result
    run = sequence_call()
    sequence = ctypes.c_int64(ctypes.addressof(words))
    faults = tuple(recording.faults.values())
    owners = [launch.owner for launch in launches]
    kept = [memory.kept for memory in recording.memory if memory.kept is not None]
    held = (words, arena, inputs, kept, owners)

    def replay(_held: Any = held) -> None:
        run(sequence)
        check_all(faults)

    return CapturedStep(output=output, replay=replay, num_launches=len(launches))
