"""Captures what a step launches on the CPU, and runs it again as one call.

A decode step of a small model is hundreds of launches of a few microseconds; called one by one from
Python, what lies between them costs as much as the small ones themselves. A captured step is the
list of its launches, with the addresses that they had: the replay is one call into machine code.
What CUDA graphs are on a GPU.

A capture holds for the memory that the step was given: who replays writes the inputs into the same
tensors. It is refused where an op of torch computes or reads a value, or a launch is given an
address that nothing keeps alive. What Python does on its own (numpy's views, lists) is not seen:
whoever says that an implementation is safe to capture answers for that.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hal.errors import CaptureError
from hal_kernels.cpu_fault import check_all
from hal_kernels.cpu_launch_memory import relocate_launch
from hal_kernels.cpu_memory_plan import ALIGNMENT, Lifetime, place
from hal_kernels.cpu_recording import RecordedLaunch, Recording, recorded_launches
from hal_kernels.cpu_sequence import SEQUENCE_WORDS, fill_sequence, sequence_call

# Ops that make memory and write none of it.
_MAKING = frozenset({"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like"})


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
    with recorded_launches() as recording, _LaunchesOnly() as seen:
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
    memory = _StepMemory(recording, seen.made, inputs, result)
    arena = shared.take(memory.num_bytes)
    return _program(recording, memory, arena, result, inputs)


class _LaunchesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Keeps what torch makes meanwhile, and notes the ops that compute: name -> calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.made: list[torch.Tensor] = []
        self.computing: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _MAKING:
            self.made.append(result)
        elif not func.is_view:
            self.computing[name] = self.computing.get(name, 0) + 1
        return result


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a tensor's storage. made: its number among the intermediate ones, or -1."""

    begin: int
    end: int
    made: int


class _StepMemory:
    """Which memory the recorded launches use, and where intermediate memory lies in a replay."""

    def __init__(
        self,
        recording: Recording,
        made: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        result: torch.Tensor,
    ) -> None:
        spans = [_span(tensor, number) for number, tensor in enumerate(made)]
        # Last: what a kernel made meanwhile and goes on using stays where it is.
        spans += [_span(tensor, -1) for tensor in (*inputs, *recording.memory)]
        by_begin = {span.begin: span for span in spans}
        self._spans = [by_begin[begin] for begin in sorted(by_begin)]
        self._begins = [span.begin for span in self._spans]
        uses: dict[int, tuple[int, int]] = {}
        for index, launch in enumerate(recording.launches):
            for word in _addresses(launch):
                if (span := self._find(word)).made >= 0:
                    uses[span.made] = (uses.get(span.made, (index, index))[0], index)
        self._add_result(uses, result, len(recording.launches))
        numbers = sorted(uses)
        lifetimes = [
            Lifetime(
                num_bytes=made[number].untyped_storage().nbytes(),
                first=uses[number][0],
                last=uses[number][1],
            )
            for number in numbers
        ]
        offsets, self.num_bytes = place(lifetimes)
        self._offsets = dict(zip(numbers, offsets, strict=True))

    def _add_result(
        self, uses: dict[int, tuple[int, int]], result: torch.Tensor, num_launches: int
    ) -> None:
        """The result is read after the last launch; an input given back is no tensor of ours."""
        span = self._find(result.untyped_storage().data_ptr())
        if span.made >= 0:
            uses[span.made] = (uses.get(span.made, (0, 0))[0], num_launches)

    def _find(self, address: int) -> _Span:
        index = bisect_right(self._begins, address) - 1
        if index < 0 or address >= self._spans[index].end:
            raise CaptureError(
                "capture of a step on the CPU",
                "launches whose memory the step's inputs, its own tensors or its kernels keep",
                f"the address {address:#x}, which is in none of them",
                "run the step call by call; a kernel that has memory of its own must hold it "
                "(hal_kernels.cpu_recording.hold)",
            )
        return self._spans[index]

    def moved(self, word: int, arena: int) -> int:
        """What a launch is given in a replay in place of the address `word`."""
        span = self._find(word)
        return word if span.made < 0 else arena + self._offsets[span.made] + word - span.begin


def _addresses(launch: RecordedLaunch) -> list[int]:
    """The addresses that a launch was given. Raises CaptureError where its binding does not say."""
    if launch.addresses is None:
        raise CaptureError(
            "capture of a step on the CPU",
            "launches that say which of their arguments are addresses",
            f"one of {len(launch.words)} words that does not",
            "name them where the worker is bound (bind_worker, Stage)",
        )
    return [launch.words[index] for index in launch.addresses if launch.words[index]]


def _span(tensor: torch.Tensor, made: int) -> _Span:
    storage = tensor.untyped_storage()
    return _Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), made)


def _program(
    recording: Recording,
    memory: _StepMemory,
    arena: torch.Tensor,
    result: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
) -> CapturedStep:
    """The launches with their addresses in `arena`, as one sequence."""
    launches, address = recording.launches, arena.data_ptr()
    num_words = SEQUENCE_WORDS + len(launches) + sum(len(launch.words) for launch in launches)
    words = (ctypes.c_int64 * num_words)()
    start, starts = SEQUENCE_WORDS + len(launches), []
    for launch in launches:
        words[start : start + len(launch.words)] = list(launch.words)
        for index in launch.addresses or ():
            if launch.words[index]:
                words[start + index] = memory.moved(launch.words[index], address)
        starts.append(relocate_launch(words, start))
        start += len(launch.words)
    fill_sequence(words, starts)
    begin = memory.moved(result.data_ptr(), address) - address
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
    held = (words, arena, inputs, recording.memory, owners)

    def replay(_held: Any = held) -> None:
        run(sequence)
        check_all(faults)

    return CapturedStep(output=output, replay=replay, num_launches=len(launches))
