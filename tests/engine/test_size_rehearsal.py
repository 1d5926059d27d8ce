"""Every size of step is met before the first request, in whatever room there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hal_engine.batch import Batch
from hal_engine.size_rehearsal import compiles_at_first_call, rehearse_sizes, sizes_to_meet


def plan(*ends: tuple[int, int], leaf: str = "kernel") -> Any:
    choice = SimpleNamespace(leaf=(SimpleNamespace(kind=leaf),))
    return SimpleNamespace(
        ops=[
            SimpleNamespace(choice=choice, tokens=SimpleNamespace(low=low, high=high))
            for low, high in ends
        ]
    )


def test_sizes_are_of_every_class_of_rows_and_of_the_plan() -> None:
    sizes = sizes_to_meet(plan((1, 20), (21, 8192)), 200)
    assert sizes == [1, 2, 3, 4, 7, 8, 15, 16, 20, 21, 31, 32, 63, 64, 127, 128, 200]
    assert sizes_to_meet(plan((1, 1)), 1) == [1]
    for most in range(2, 300):
        sizes = sizes_to_meet(plan(), most)
        classes = {1 << (n - 1).bit_length() for n in range(1, most + 1)}
        assert {1 << (n - 1).bit_length() for n in sizes} == classes
        assert max(sizes) == most


def test_only_what_is_compiled_at_its_first_call_is_rehearsed() -> None:
    assert compiles_at_first_call(plan((1, 2)))
    assert not compiles_at_first_call(plan((1, 2), leaf="symbol"))


@pytest.mark.parametrize(
    "room",
    [
        {},
        {"max_model_len": 5},
        {"num_blocks": 1, "block_size": 4},
        {"num_blocks": 3, "block_size": 4, "max_model_len": 7},
        {"num_blocks": 40, "block_size": 16, "max_model_len": 100},
    ],
    ids=str,
)
def test_each_is_run_and_no_block_is_written_twice_in_a_step(
    fake_runner: Any, room: dict[str, int]
) -> None:
    run: list[Batch] = []
    filtered: list[int] = []

    class Runner(fake_runner):  # type: ignore[misc]
        def __init__(self, **sizes: int) -> None:
            super().__init__(**sizes)
            self._kv[:] = 0  # as a cache is that nobody has written

        def execute(self, batch: Batch) -> Any:
            run.append(batch)
            return super().execute(batch)

        def top_k_top_p(self, logits: Any, top_k: Any, top_p: Any) -> Any:
            filtered.append(len(logits))
            return super().top_k_top_p(logits, top_k, top_p)

    runner = Runner(**room)
    told: list[tuple[str, int, int]] = []
    count = rehearse_sizes(
        runner,
        plan((1, 9)),
        max_num_batched_tokens=96,
        max_num_seqs=6,
        progress=lambda *seen: told.append(seen),
    )
    assert count == len(run)
    assert told == [("compile", number, count) for number in range(1, count + 1)]
    for batch in run:
        assert batch == Batch.from_json(batch.to_json())
        slots = [
            sequence.block_ids[position // runner.block_size] * runner.block_size
            + position % runner.block_size
            for sequence in (*batch.decode, *batch.prefill)
            for position in range(sequence.start, sequence.start + len(sequence.token_ids))
        ]
        assert len(set(slots)) == len(slots) == batch.num_tokens
        assert max(slots) < runner.num_blocks * runner.block_size
    longest = min(runner.max_model_len, runner.num_blocks * runner.block_size)
    most = min(96, max(b.num_tokens for b in run if b.prefill))
    if room.get("max_model_len", 1 << 30) % runner.block_size == 0:
        assert most == min(96, runner.num_blocks * runner.block_size)
    assert max(len(b.prefill) for b in run) <= 6
    assert max(len(b.decode) for b in run) == min(6, runner.num_blocks)
    assert set(filtered) >= {1, min(6, runner.num_blocks)}
    assert {s.start + len(s.token_ids) for b in run for s in b.decode} >= {1, longest}
    assert {"last", "all"} == {s.logits for b in run for s in b.prefill}


def test_what_the_runner_raises_goes_on(fake_runner: Any) -> None:
    class Failing(fake_runner):  # type: ignore[misc]
        def execute(self, batch: Batch) -> Any:
            if batch.num_tokens > 40:
                raise RuntimeError("no code for so many rows")
            return super().execute(batch)

    with pytest.raises(RuntimeError, match="so many rows"):
        rehearse_sizes(
            Failing(max_model_len=200), plan(), max_num_batched_tokens=64, max_num_seqs=4
        )
