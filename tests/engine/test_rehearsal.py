from __future__ import annotations

import gc
from typing import Any

import pytest

from hal_engine.cli.serve import freeze_loaded_objects
from hal_engine.rehearsal import NEW_TOKENS, PROMPT_TOKENS, rehearse
from hal_engine.scheduler import SchedulerConfig


def test_it_meets_what_a_request_meets_and_leaves_nothing(
    fake_runner: Any, byte_tokenizer: Any, make_engine: Any, make_request: Any, oracle: Any
) -> None:
    import asyncio

    filtered: list[int] = []

    class Runner(fake_runner):  # type: ignore[misc]
        def top_k_top_p(self, logits: Any, top_k: Any, top_p: Any) -> Any:
            filtered.append(len(logits))
            return super().top_k_top_p(logits, top_k, top_p)

    runner = Runner()
    steps = rehearse(runner, byte_tokenizer, SchedulerConfig(max_num_seqs=8))
    assert steps == NEW_TOKENS
    # Two prompts, then decoding both; and the op that cuts the distribution.
    assert runner.batches == [(0, 2, 2 * PROMPT_TOKENS), *[(2, 0, 2)] * (NEW_TOKENS - 1)]
    assert filtered == [1] * NEW_TOKENS

    async def scenario() -> None:
        engine = make_engine(runner)
        stats = engine.stats()
        assert (stats.generated_tokens, stats.kv_blocks_used, stats.steps) == (0, 0, 0)
        request = make_request("hello", max_tokens=9)
        events = [event async for event in engine.generate(request)]
        assert [event.token_id for event in events] == oracle(b"hello", 9)
        await engine.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "size",
    [
        {"max_model_len": 3},
        {"max_model_len": 5},
        {"num_blocks": 1, "block_size": 4},
        {"num_blocks": 2, "block_size": 4},
        {"num_blocks": 11, "block_size": 4},  # room for one of the two at a time
    ],
)
def test_it_fits_into_little_room(fake_runner: Any, byte_tokenizer: Any, size: Any) -> None:
    runner = fake_runner(**size)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    assert (rehearse(runner, byte_tokenizer, config) > 0) == (size.get("max_model_len") != 3)


def test_what_loading_made_is_not_collected_again() -> None:
    gc.unfreeze()
    kept = [[i] for i in range(1000)]
    try:
        freeze_loaded_objects()
        assert gc.get_freeze_count() > len(kept)
        assert all(o is not kept for o in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_runner_that_fails_fails_before_it_serves(fake_runner: Any, byte_tokenizer: Any) -> None:
    def fail(step: int) -> None:
        raise RuntimeError("the device is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        rehearse(fake_runner(on_execute=fail), byte_tokenizer, SchedulerConfig())
