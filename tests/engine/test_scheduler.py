"""The scheduler with the core's step around it, but no threads: every step is inspected."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_engine import prompt_budget
from hal_engine.api import RequestRefusedError, TokenEvent
from hal_engine.batch import Batch, ScheduledSequence
from hal_engine.engine_core import EngineCore
from hal_engine.kv_cache import BlockPool
from hal_engine.scheduler import Scheduler, SchedulerConfig
from hal_engine.sequence import LiveSequence, Status


class Harness:
    """Runs a core to the end, checking the books after every step."""

    def __init__(self, runner: Any, tokenizer: Any, **config: Any) -> None:
        self.core = EngineCore(runner, tokenizer, SchedulerConfig(**config))
        self.runner = runner
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokenEvent] = {}
        self.prompt_rows: dict[str, list[int]] = {}  # token ids that prompt_logprobs came for

    def submit(self, request: Any) -> LiveSequence:
        self.core.refuse_if_too_long(request)
        self.tokens[request.request_id] = []
        return self.core.submit(request, None, time.monotonic())

    def step(self) -> None:
        scheduler = self.core.scheduler
        for _, event in self.core.step():
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.prompt_logprobs is not None:
                assert event.request_id not in self.prompt_rows, "prompt_logprobs came twice"
                own = event.prompt_logprobs[1:]
                self.prompt_rows[event.request_id] = [o.token_id for o in own if o is not None]
            if event.finish_reason is not None:
                assert event.request_id not in self.last, "two last events"
                self.last[event.request_id] = event
        scheduler.check_invariants()
        config = scheduler.config
        if self.runner.batches:
            decode, prefill, tokens = self.runner.batches[-1]
            assert tokens <= config.max_num_batched_tokens
            assert decode + prefill <= config.max_num_seqs

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.core.has_work:
                assert self.core.scheduler.pool.num_used == 0
                return
            self.step()
        raise AssertionError(f"still not done after {most} steps")


Make = Callable[..., Harness]


@pytest.fixture
def harness(fake_runner: Any, byte_tokenizer: Any) -> Make:
    def make(runner: dict[str, Any] | None = None, **config: Any) -> Harness:
        config.setdefault("max_num_seqs", 8)
        return Harness(fake_runner(**(runner or {})), byte_tokenizer, **config)

    return make


def prompts(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(longest)]
    return [
        shared[: rng.randrange(longest)] + [rng.randrange(256) for _ in range(rng.randrange(1, 12))]
        for _ in range(count)
    ]


CONFIGS = {
    "one at a time": ({"num_blocks": 256}, {"max_num_seqs": 1, "prefix_reuse": False}),
    "batched": ({"num_blocks": 256}, {"prefix_reuse": False}),
    "chunked": ({"num_blocks": 256}, {"max_num_batched_tokens": 9, "prefix_reuse": False}),
    "prefix reuse": ({"num_blocks": 256}, {}),
    "chunked with prefix reuse": ({"num_blocks": 256}, {"max_num_batched_tokens": 11}),
    "a quarter of the KV demand": ({"num_blocks": 32}, {}),  # 8 sequences of up to 16 blocks
    "a quarter, chunked": ({"num_blocks": 32}, {"max_num_batched_tokens": 9}),
    "barely one": ({"num_blocks": 19}, {"max_num_batched_tokens": 9}),
    "blocks of one token": ({"num_blocks": 300, "block_size": 1}, {"max_num_batched_tokens": 9}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_do_not_depend_on_scheduling(
    name: str, harness: Make, make_request: Any, oracle: Any
) -> None:
    runner, config = CONFIGS[name]
    bench = harness(runner, **config)
    expected = {}
    for i, prompt in enumerate(prompts(1, 16)):
        expected[f"{i}"] = oracle(prompt, 24)
        bench.submit(make_request(prompt, f"{i}", max_tokens=24))
    bench.run()
    assert bench.tokens == expected
    assert {e.finish_reason for e in bench.last.values()} == {"length"}
    stats = bench.core.stats()
    if "quarter" in name:
        assert stats.preemptions > 0
    if "prefix" in name:
        assert stats.cached_prompt_tokens > 0


def test_decode_is_in_every_step_while_a_long_prompt_comes_in_chunks(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"max_model_len": 1000, "num_blocks": 400}, max_num_batched_tokens=16)
    bench.submit(make_request("ab", "short", max_tokens=60))
    bench.step()
    long = list(b"x" * 600)
    bench.submit(make_request(long, "long", max_tokens=2))
    done = []
    for _ in range(40):
        before = len(bench.tokens["short"])
        bench.step()
        done.append(len(bench.tokens["short"]) - before)
    assert done == [1] * 40  # each of the 40 chunks of 15 came beside a decoded token
    assert bench.runner.batches[-1] == (1, 1, 16)
    bench.run()
    assert bench.tokens["long"] == oracle(long, 2)


def test_first_come_first_served(harness: Make, make_request: Any) -> None:
    bench = harness({"num_blocks": 24}, max_num_seqs=2)
    for i in range(6):
        bench.submit(make_request(f"prompt {i}", f"{i}", max_tokens=10))
    bench.run()
    assert list(bench.last) == [f"{i}" for i in range(6)]


LONG = {"max_model_len": 5000, "num_blocks": 3000}


def unlike(rng: random.Random, *lengths: int) -> list[list[int]]:
    """Prompts that share nothing."""
    return [[i, *(rng.randrange(256) for _ in range(n - 1))] for i, n in enumerate(lengths)]


def chunks_of(bench: Harness, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Of each step from now on: prompt tokens by sequence."""
    seen: list[dict[int, int]] = []
    execute = bench.runner.execute

    def noting(batch: Batch) -> Any:
        seen.append({entry.seq_id: len(entry.token_ids) for entry in batch.prefill})
        return execute(batch)

    monkeypatch.setattr(bench.runner, "execute", noting)
    return seen


def test_a_short_prompt_is_not_held_up_by_a_long_one(
    harness: Make, make_request: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, *short = unlike(random.Random(3), 2000, 100, 100, 100, 100)
    bench = harness(LONG, max_num_batched_tokens=512)
    seen = chunks_of(bench, monkeypatch)
    bench.submit(make_request(long, "long", max_tokens=4))
    for i, prompt in enumerate(short):
        bench.submit(make_request(prompt, f"{i}", max_tokens=4))
    bench.step()
    assert seen[-1] == {1: 256, 2: 100, 3: 100, 4: 56}
    assert [len(bench.tokens[f"{i}"]) for i in range(4)] == [1, 1, 0, 0]
    bench.step()
    # Two decode; the fourth has the rest; what nobody else wants goes to the long one.
    assert seen[-1] == {1: 510 - 44 - 100, 4: 44, 5: 100}
    assert [len(bench.tokens[f"{i}"]) for i in range(4)] == [2, 2, 1, 1]
    bench.step()
    assert seen[-1] == {1: 512 - 4}
    bench.run()
    assert bench.tokens["long"] == oracle(long, 4)
    assert [bench.tokens[f"{i}"] for i in range(4)] == [oracle(prompt, 4) for prompt in short]


def test_equal_prompts_take_turns_as_they_came(
    harness: Make, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where halves would only divide what fits whole, the first come is served first."""
    bench = harness(LONG, max_num_batched_tokens=512, max_num_seqs=16)
    seen = chunks_of(bench, monkeypatch)
    for i, prompt in enumerate(unlike(random.Random(4), *[128] * 16)):
        bench.submit(make_request(prompt, f"{i}", max_tokens=20))
    for _ in range(5):
        bench.step()
    assert [list(step.values()) for step in seen] == [
        [128, 128, 128, 128],
        [128, 128, 128, 124],
        [4, 128, 128, 128, 117],
        [11, 128, 128, 128, 106],
        [22],
    ]


@pytest.mark.parametrize("seed", range(5))
def test_no_token_of_a_step_is_left_over_and_the_oldest_prompt_has_half(
    harness: Make, make_request: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([50, 150, 700, 1500]) + rng.randrange(50) for _ in range(14)]
    asked = unlike(rng, *lengths)
    bench = harness(LONG, max_num_batched_tokens=256, max_num_seqs=8)
    seen = chunks_of(bench, monkeypatch)
    scheduler = bench.core.scheduler
    todo = list(enumerate(asked))
    while todo or bench.core.has_work:
        for _ in range(rng.randrange(3)):
            if todo:
                i, prompt = todo.pop(0)
                bench.submit(make_request(prompt, f"{i}", max_tokens=5))
        lacking = {
            seq.seq_id: len(seq.token_ids) - seq.num_computed
            for seq in [*scheduler.running, *scheduler.waiting]
            if seq.status is not Status.DECODE
        }
        if not bench.core.has_work:
            continue
        seats = 8 - len(scheduler.running)
        bench.step()
        decoding, _, tokens = bench.runner.batches[-1]
        budget = 256 - decoding
        if lacking:
            oldest = min(lacking)
            assert seen[-1][oldest] >= min(lacking[oldest], budget // 2)
        if seats >= len(lacking):  # none waits for a seat
            assert tokens - decoding == min(budget, sum(lacking.values()))
    assert bench.tokens == {f"{i}": oracle(prompt, 5) for i, prompt in enumerate(asked)}


def test_copies_wait_for_what_an_older_prompt_computes_and_share_it(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    """A long prompt leaves half of each step to others, but not to its own copies."""
    (document,) = unlike(random.Random(6), 1600)
    forks = {"a": document, "b": [*document, 7], "c": [*document[:1200], 8, 8], "d": [9, 9, 9]}
    bench = harness(LONG, max_num_batched_tokens=512)
    for name, ids in forks.items():
        bench.submit(make_request(ids, name, max_tokens=3))
    bench.run()
    assert bench.tokens == {name: oracle(ids, 3) for name, ids in forks.items()}
    computed = sum(tokens - decoding for decoding, _, tokens in bench.runner.batches)
    assert computed == 1600 + 1 + 2 + 3


def test_the_youngest_is_preempted_and_continues_where_it_was(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"num_blocks": 8}, prefix_reuse=False)
    old = bench.submit(make_request("12345678", "old", max_tokens=20))
    young = bench.submit(make_request("abcdefgh", "young", max_tokens=20))
    bench.run()
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
    assert bench.tokens["young"] == oracle(b"abcdefgh", 20)
    assert bench.last["young"].num_cached_tokens == 0


def test_a_prefix_hit_is_counted_and_never_the_whole_prompt(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness()
    bench.submit(make_request("0123456789abcdef", "a", max_tokens=3))
    bench.run()
    bench.submit(make_request("0123456789abcdef", "b", max_tokens=3))
    bench.run()
    assert bench.last["b"].num_cached_tokens == 12  # 4 blocks of 4 match; the last is computed
    assert bench.tokens["a"] == bench.tokens["b"] == oracle(b"0123456789abcdef", 3)
    stats = bench.core.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (32, 12)


@pytest.mark.parametrize("budget", [512, 40])
def test_equal_prompts_of_one_step_are_computed_once(
    harness: Make, make_request: Any, oracle: Any, budget: int
) -> None:
    """Copies and forks of a prompt that came together share what the first of them computes."""
    prompt = list(range(100))
    forks = {"a": prompt, "b": prompt, "c": [*prompt[:50], 7, 7], "d": prompt}
    bench = harness({"num_blocks": 256}, max_num_batched_tokens=budget)
    sequences = {
        name: bench.submit(make_request(ids, name, max_tokens=20)) for name, ids in forks.items()
    }
    bench.run()
    assert bench.tokens == {name: oracle(ids, 20) for name, ids in forks.items()}
    cached = {name: seq.num_cached_tokens for name, seq in sequences.items()}
    # Blocks of 4; the last token of a prompt is computed in any case.
    assert cached == {"a": 0, "b": 96, "c": 48, "d": 96}
    if budget == 512:
        assert bench.runner.batches[0] == (0, 4, 100 + 4 + 4 + 4)


def test_a_shared_prompt_outlives_the_one_that_computed_it(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    prompt = list(range(50))
    bench = harness({"num_blocks": 64})
    first = bench.submit(make_request(prompt, "a", max_tokens=20))
    bench.submit(make_request(prompt, "b", max_tokens=20))
    bench.step()
    bench.core.cancel(first)
    bench.core.scheduler.check_invariants()
    bench.run()
    assert bench.tokens["b"] == oracle(prompt, 20)


@pytest.mark.parametrize("phase", list(Status))
def test_cancellation_in_every_phase_gives_all_blocks_back(
    phase: Status, harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"num_blocks": 12}, max_num_batched_tokens=8, max_num_seqs=2)
    bench.submit(make_request("other one", "other", max_tokens=30))
    bench.step()
    bench.step()
    victim = bench.submit(make_request("0123456789abc", "victim", max_tokens=20))
    for _ in range(200):
        if victim.status is phase:
            break
        bench.step()
    assert victim.status is phase
    bench.core.cancel(victim)
    bench.core.cancel(victim)  # again is harmless
    bench.core.scheduler.check_invariants()
    assert victim.block_ids == []
    bench.run()
    assert bench.tokens["other"] == oracle(b"other one", 30)
    assert ("victim" in bench.last) == (phase is Status.FINISHED)


def test_deadlines_end_requests_wherever_they_are(
    harness: Make, make_request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = harness(max_num_seqs=1)
    bench.submit(make_request("a", "runs", max_tokens=50, deadline_s=5.0))
    bench.submit(make_request("b", "waits", max_tokens=50, deadline_s=9.0))
    bench.submit(make_request("c", "no deadline", max_tokens=5))
    now = time.monotonic()
    bench.step()
    monkeypatch.setattr(time, "monotonic", lambda: now + 7)
    bench.step()
    assert list(bench.last) == ["runs"]
    assert "deadline of 5 s" in (bench.last["runs"].error or "")
    monkeypatch.setattr(time, "monotonic", lambda: now + 10)
    bench.run()
    assert bench.last["waits"].finish_reason == "error"
    assert bench.last["no deadline"].finish_reason == "length"


def test_what_never_fits_is_refused_and_what_just_fits_runs(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"num_blocks": 5, "block_size": 4})
    with pytest.raises(RequestRefusedError, match="need 6 KV blocks, the whole cache has 5"):
        bench.submit(make_request("x" * 12, "no", max_tokens=10))
    bench.submit(make_request("x" * 12, "yes", max_tokens=9))  # the newest token needs no KV
    bench.submit(make_request("x" * 20, "prompt only", max_tokens=1))
    bench.run()
    assert bench.tokens["yes"] == oracle(b"x" * 12, 9)
    assert bench.tokens["prompt only"] == oracle(b"x" * 20, 1)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "would starve prompts"),
    ],
)
def test_limits_that_cannot_work_are_refused(config: dict[str, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SchedulerConfig(**config)


def test_blocks_of_a_lone_prompt_are_in_a_row(harness: Make, make_request: Any) -> None:
    bench = harness()
    seq = bench.submit(make_request("z" * 30, "a", max_tokens=20))
    for _ in range(10):
        bench.step()
    assert seq.block_ids == list(range(10))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_any_traffic_ends_with_the_right_tokens_and_an_empty_cache(
    data: st.DataObject,
    seed: int,
    fake_runner: Any,
    byte_tokenizer: Any,
    make_request: Any,
    oracle: Any,
) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_budget, "LEAST_SHARE", data.draw(st.integers(1, 30), "share"))
        _any_traffic(data, seed, rng, fake_runner, byte_tokenizer, make_request, oracle)


def _any_traffic(
    data: st.DataObject,
    seed: int,
    rng: random.Random,
    fake_runner: Any,
    byte_tokenizer: Any,
    make_request: Any,
    oracle: Any,
) -> None:
    size = data.draw(st.integers(1, 6), "block size")
    num_blocks = -(-45 // size) + data.draw(st.integers(0, 30), "blocks beyond one request")
    max_num_seqs = data.draw(st.integers(1, 6), "max_num_seqs")
    bench = Harness(
        fake_runner(num_blocks=num_blocks, block_size=size),
        byte_tokenizer,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + data.draw(st.integers(0, 20), "more tokens"),
        prefix_reuse=data.draw(st.booleans(), "prefix reuse"),
        max_prompt_logits_rows=data.draw(st.integers(1, 9), "rows"),
    )
    todo = prompts(seed, 10, longest=20)
    live: dict[str, LiveSequence] = {}
    asked: dict[str, tuple[Sequence[int], int]] = {}
    while todo or bench.core.has_work:
        if todo and rng.random() < 0.4:
            name, count = f"{len(todo)}", rng.randrange(1, 14)
            asked[name] = (todo[-1], count)
            options = {"prompt_logprobs": 0} if rng.random() < 0.5 else {}
            live[name] = bench.submit(make_request(todo.pop(), name, max_tokens=count, **options))
        if live and rng.random() < 0.05:
            bench.core.cancel(live.pop(rng.choice(list(live))))
        bench.step()
    assert bench.core.scheduler.pool.num_used == 0
    for name, seq in live.items():
        assert seq.status is Status.FINISHED
        assert bench.tokens[name] == oracle(*asked[name])
        if seq.prompt_logprobs is not None:
            assert bench.prompt_rows[name] == list(asked[name][0][1:])
    for name, event in bench.last.items():
        assert event.finish_reason == "length", name


def test_prompt_rows_are_collected_anew_after_preemption(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"num_blocks": 12}, max_prompt_logits_rows=1)
    bench.submit(make_request("12345678", "old", max_tokens=30))
    for _ in range(12):
        bench.step()
    prompt = list(b"abcdefghijklmnopq")
    seq = bench.submit(make_request(prompt, "young", max_tokens=3, prompt_logprobs=0))
    while seq.num_preemptions == 0:
        bench.step()
        assert seq.status is not Status.DECODE, "not preempted inside its prompt"
    bench.run()
    assert bench.prompt_rows["young"] == prompt[1:]
    assert bench.tokens["young"] == oracle(prompt, 3)


def test_overload_of_200_with_a_small_cache_ends_and_is_right(
    harness: Make, make_request: Any, oracle: Any
) -> None:
    bench = harness({"num_blocks": 40}, max_num_seqs=16, max_num_batched_tokens=64)
    expected = {}
    for i, prompt in enumerate(prompts(3, 200)):
        expected[f"{i}"] = oracle(prompt, 8)
        bench.submit(make_request(prompt, f"{i}", max_tokens=8))
    bench.run()
    assert bench.tokens == expected


def test_batch_survives_json_and_nothing_else_does() -> None:
    batch = Batch(
        decode=[ScheduledSequence(1, [7], 12, [3, 4, 5, 6], "last")],
        prefill=[ScheduledSequence(2, [1, 2], 0, [9], "none")],
    )
    assert Batch.from_json(batch.to_json()) == batch
    good = batch.to_json().decode()
    for old, new, match in [
        ("[7]", "[7,8]", "exactly one new token"),
        ("[7]", "[true]", "non-negative integer"),
        ("12", "-1", "non-negative integer"),
        ("12", "1.0", "non-negative integer"),
        ('"none"', '"most"', "logits"),
        ("[9]", "[]", "not empty"),
        ('"last"]', '"last",1]', "five fields"),
    ]:
        assert old in good
        with pytest.raises(ValueError, match=match):
            Batch.from_json(good.replace(old, new).encode())
    with pytest.raises(ValueError, match="two groups"):
        Batch.from_json(b"{}")


def test_schedule_with_nothing_to_do_is_none() -> None:
    assert Scheduler(SchedulerConfig(), BlockPool(4, 4)).schedule() is None
