"""Which memory the launches of a captured step use, and where intermediate memory lies in a replay.

A step gives the memory of what nobody reads any more to the next tensor, while it is captured too:
an address means what was made there last, before the launch that it is given to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch

from hal.errors import CaptureError
from hal_kernels.cpu_memory_plan import Lifetime, place
from hal_kernels.cpu_recording import RecordedLaunch, RecordedMemory, Recording


class StepMemory:
    """Where what the step made for itself lies in memory that replays share.

    Raises CaptureError for a launch that was given an address of nothing that was recorded, or that
    does not say which of its words are addresses.
    """

    def __init__(self, recording: Recording, result: torch.Tensor) -> None:
        self._memory = recording.memory
        current, coming = _CurrentMemory(recording.memory), 0
        # (number of the launch, index of its word) -> number of the memory that it points into.
        self._found: dict[tuple[int, int], int] = {}
        uses: dict[int, tuple[int, int]] = {}
        for number, launch in enumerate(recording.launches):
            while coming < len(self._memory) and self._memory[coming].since <= number:
                current.add(coming)
                coming += 1
            for index in _addresses(launch):
                found = current.find(launch.words[index])
                self._found[number, index] = found
                uses[found] = (uses.get(found, (number, number))[0], number)
        for late in range(coming, len(self._memory)):
            current.add(late)
        # The result is read after the last launch.
        self._result = current.find(result.untyped_storage().data_ptr())
        last = len(recording.launches)
        uses[self._result] = (uses.get(self._result, (0, 0))[0], last)
        self._place(uses)

    def _place(self, uses: dict[int, tuple[int, int]]) -> None:
        """Of what is not kept where it is: an input that is given back, too, stays there."""
        numbers = sorted(number for number in uses if self._memory[number].kept is None)
        lifetimes = [
            Lifetime(
                num_bytes=self._memory[number].end - self._memory[number].begin,
                first=uses[number][0],
                last=uses[number][1],
            )
            for number in numbers
        ]
        offsets, self.num_bytes = place(lifetimes)
        self._offsets = dict(zip(numbers, offsets, strict=True))

    def moved(self, launch: int, index: int, word: int, arena: int) -> int:
        """What that word of a launch is in a replay in place of the address `word`."""
        return self._moved(self._found[launch, index], word, arena)

    def moved_result(self, word: int, arena: int) -> int:
        """As `moved`, of an address in the result."""
        return self._moved(self._result, word, arena)

    def _moved(self, number: int, word: int, arena: int) -> int:
        memory = self._memory[number]
        return (
            word if memory.kept is not None else arena + self._offsets[number] + word - memory.begin
        )


class _CurrentMemory:
    """The recorded memory that addresses mean at one moment, by address."""

    def __init__(self, memory: list[RecordedMemory]) -> None:
        self._memory = memory
        self._begins: list[int] = []
        self._numbers: list[int] = []

    def add(self, number: int) -> None:
        """From now on its addresses mean it. What they meant before is gone."""
        new = self._memory[number]
        if new.begin == new.end:
            return
        low = bisect_right(self._begins, new.begin) - 1
        if low < 0 or self._memory[self._numbers[low]].end <= new.begin:
            low += 1
        high = bisect_left(self._begins, new.end)
        self._begins[low:high] = [new.begin]
        self._numbers[low:high] = [number]

    def find(self, address: int) -> int:
        """The number of the memory that the address is in. Raises CaptureError if there is none."""
        index = bisect_right(self._begins, address) - 1
        if index < 0 or address >= self._memory[self._numbers[index]].end:
            raise CaptureError(
                "capture of a step on the CPU",
                "launches whose memory the step's inputs, its own tensors or its kernels keep",
                f"the address {address:#x}, which is in none of them",
                "run the step call by call; a kernel that has memory of its own must hold it "
                "before the launch (hal_kernels.cpu_recording.hold)",
            )
        return self._numbers[index]


def _addresses(launch: RecordedLaunch) -> list[int]:
    """Which words of a launch are addresses that it was given. Raises CaptureError where its
    binding does not say."""
    if launch.addresses is None:
        raise CaptureError(
            "capture of a step on the CPU",
            "launches that say which of their arguments are addresses",
            f"one of {len(launch.words)} words that does not",
            "name them where the worker is bound (bind_worker, Stage)",
        )
    return [index for index in launch.addresses if launch.words[index]]
