"""What an address means in a step whose tensors follow each other in the same memory."""

from __future__ import annotations

import random

import pytest
import torch

from hal.errors import CaptureError
from hal_kernels.cpu_recording import RecordedLaunch, RecordedMemory, Recording
from hal_kernels.cpu_step_memory import StepMemory

ARENA = 1 << 40


def memory(since: int, begin: int, size: int, kept: torch.Tensor | None = None) -> RecordedMemory:
    return RecordedMemory(since=since, begin=begin, end=begin + size, kept=kept)


def launch(*words: int) -> RecordedLaunch:
    return RecordedLaunch(words=words, addresses=tuple(range(len(words))), owner=None)


def with_result(result: torch.Tensor, entries: list[RecordedMemory]) -> list[RecordedMemory]:
    storage = result.untyped_storage()
    return [memory(0, storage.data_ptr(), storage.nbytes(), result), *entries]


def test_an_address_is_of_what_was_made_there_last() -> None:
    """Two tensors at one address, the second larger, and a third over parts of both."""
    result = torch.zeros(4)
    out = result.data_ptr()
    recording = Recording(
        launches=[launch(1000), launch(1000, 3000), launch(1100, 3000), launch(1080, out)],
        memory=with_result(
            result,
            [memory(0, 1000, 64), memory(1, 3000, 64), memory(2, 1000, 256), memory(3, 1064, 64)],
        ),
    )
    found = StepMemory(recording, result)
    places = [
        found.moved(0, 0, 1000, ARENA),
        found.moved(1, 0, 1000, ARENA),
        found.moved(1, 1, 3000, ARENA),
        found.moved(2, 0, 1100, ARENA) - 100,
        found.moved(2, 1, 3000, ARENA),
        found.moved(3, 0, 1080, ARENA) - 16,
    ]
    first, again, second, third, second_again, fourth = (place - ARENA for place in places)
    assert first == again
    assert second == second_again
    # The second is in use beside the first and beside the third, which follow each other.
    assert second >= first + 64 or first >= second + 64
    assert second >= third + 256 or third >= second + 64
    assert 0 <= fourth <= found.num_bytes - 64
    assert found.num_bytes <= 64 + 64 + 256
    assert found.moved(3, 1, out, ARENA) == out
    assert found.moved_result(out, ARENA) == out


def test_memory_that_a_kernel_keeps_stays_from_then_on() -> None:
    result, own = torch.zeros(4), torch.zeros(16)
    begin = own.data_ptr()
    recording = Recording(
        launches=[launch(begin), launch(begin + 8)],
        memory=with_result(result, [memory(0, begin, 64), memory(1, begin, 64, own)]),
    )
    found = StepMemory(recording, result)
    assert ARENA <= found.moved(0, 0, begin, ARENA) < ARENA + 64
    assert found.moved(1, 0, begin + 8, ARENA) == begin + 8


def test_memory_that_comes_up_later_is_not_meant_before() -> None:
    result = torch.zeros(4)
    entries = [memory(1, 1000, 64)]
    with pytest.raises(CaptureError, match="before the launch"):
        StepMemory(Recording(launches=[launch(1000)], memory=with_result(result, entries)), result)


def test_as_many_tensors_as_there_are_never_overlap_in_use() -> None:
    """A random step, whose allocator gives addresses again, against what it wrote where."""
    for _ in range(50):
        result, entries, launches, live = torch.zeros(4), [], [], {}
        written: list[list[tuple[int, int]]] = []  # of each launch: (tensor, word)
        for number in range(30):
            for place in [p for p in live if random.random() < 0.4]:
                del live[place]
            for place in random.sample(range(8), 2):
                if place not in live:
                    live[place] = len(entries)
                    entries.append(memory(number, 4096 * (place + 1), random.randint(1, 4096)))
            used = random.sample(sorted(live), min(3, len(live)))
            written.append([(live[place], 4096 * (place + 1)) for place in used])
            launches.append(launch(*(word for _, word in written[-1])))
        found = StepMemory(
            Recording(launches=launches, memory=with_result(result, entries)), result
        )
        places: dict[int, set[int]] = {}
        spans: dict[int, list[int]] = {}
        for number, words in enumerate(written):
            for index, (tensor, word) in enumerate(words):
                places.setdefault(tensor, set()).add(found.moved(number, index, word, 0))
                spans.setdefault(tensor, []).append(number)
        assert all(len(at) == 1 for at in places.values())
        for a in places:
            for b in places:
                if a < b and spans[a][0] <= spans[b][-1] and spans[b][0] <= spans[a][-1]:
                    (at_a,), (at_b,) = places[a], places[b]
                    size_a, size_b = (entries[i].end - entries[i].begin for i in (a, b))
                    assert at_a + size_a <= at_b or at_b + size_b <= at_a
