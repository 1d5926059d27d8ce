from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch

from hal_engine.api import (
    EngineDeadError,
    GrammarSpec,
    QueueFullError,
    RequestRefusedError,
    TokenEvent,
)
from hal_engine.engine_loop import Engine
from hal_engine.offline import generate_all, generate_sync

EOS = 256


@pytest.fixture
def running(make_engine: Callable[..., Engine]) -> Callable[..., Any]:
    """`async with running(runner, **config) as engine`: closed at the end, KV at its baseline."""

    @asynccontextmanager
    async def run(runner: Any, **config: Any) -> AsyncIterator[Engine]:
        engine = make_engine(runner, **config)
        try:
            yield engine
            await engine.drain()
            assert engine.stats().kv_blocks_used == 0
            assert (engine.stats().running, engine.stats().waiting) == (0, 0)
        finally:
            await engine.close()
        assert runner.is_closed

    return run


class Gate:
    """Lets the runner execute only while open; tells when it stands before a closed gate."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, _: int) -> None:
        self.reached.set()
        assert self.opened.wait(30)


async def collect(engine: Engine, request: Any) -> list[TokenEvent]:
    return [event async for event in engine.generate(request)]


def tokens(events: list[TokenEvent]) -> list[int]:
    return [e.token_id for e in events if e.token_id is not None]


def test_stream_has_the_tokens_the_text_and_the_counts(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any, byte_tokenizer: Any
) -> None:
    async def scenario() -> None:
        async with running(fake_runner()) as engine:
            events = await collect(engine, make_request("hello", max_tokens=20))
            assert tokens(events) == oracle(b"hello", 20)
            text = "".join(e.text for e in events)
            assert text == byte_tokenizer.decode(tokens(events), skip_special_tokens=True)
            assert [e.num_generated_tokens for e in events] == list(range(1, 21))
            assert {e.num_prompt_tokens for e in events} == {5}
            assert [e.finish_reason for e in events] == [None] * 19 + ["length"]
            stats = engine.stats()
            assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (5, 20, 20)
            assert (engine.model_id, engine.plan_hash()) == ("fake", "abc")

    asyncio.run(scenario())


def test_many_at_once_equal_one_by_one(
    make_engine: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    engine = make_engine(fake_runner(num_blocks=40), max_num_seqs=8, max_num_batched_tokens=20)
    requests = [make_request(f"prompt number {i}", f"{i}", max_tokens=12) for i in range(24)]
    done = generate_sync(engine, requests)
    for i, completion in enumerate(done):
        assert list(completion.token_ids) == oracle(f"prompt number {i}".encode(), 12)
        assert completion.request_id == f"{i}"
    assert engine.stats().kv_blocks_used == 0
    asyncio.run(engine.close())


def test_eos_and_stop_ids_and_stop_strings_end_a_stream(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    said = oracle(b"tell me", 40)
    letters = [t for t in said if 32 < t < 127]
    stop = chr(letters[1])
    ends = {12: EOS}  # the 12th token is EOS

    def end_at_12(count: int, logits: torch.Tensor) -> torch.Tensor:
        if count in ends:
            logits[:, EOS] = 100
        return logits

    async def scenario() -> None:
        async with running(fake_runner(change=end_at_12), prefix_reuse=False) as engine:
            events = await collect(engine, make_request("tell me", max_tokens=40, ignore_eos=False))
            assert tokens(events) == [*said[:11], EOS]
            assert (events[-1].finish_reason, events[-1].token_id) == ("stop", EOS)
            assert "<|" not in "".join(e.text for e in events)
            ends.clear()
            by_id = frozenset({said[5]})
            events = await collect(
                engine, make_request("tell me", max_tokens=40, stop_token_ids=by_id)
            )
            assert tokens(events) == said[: said.index(said[5]) + 1]
            assert events[-1].finish_reason == "stop"
            events = await collect(
                engine, make_request("tell me", max_tokens=40, stop_strings=(stop,))
            )
            text = "".join(e.text for e in events)
            whole = bytes(t for t in said if t < 256).decode("utf-8", "replace")
            assert text == whole[: whole.index(stop)]
            assert events[-1].finish_reason == "stop"

    asyncio.run(scenario())


def test_min_tokens_puts_the_end_off(running: Any, fake_runner: Any, make_request: Any) -> None:
    def always_eos(_: int, logits: torch.Tensor) -> torch.Tensor:
        logits[:, EOS] = 100
        return logits

    async def scenario() -> None:
        async with running(fake_runner(change=always_eos)) as engine:
            options = {"max_tokens": 20, "ignore_eos": False}
            assert tokens(await collect(engine, make_request("a", **options))) == [EOS]
            events = await collect(engine, make_request("a", min_tokens=7, **options))
            assert len(tokens(events)) == 8
            assert EOS not in tokens(events)[:7]

    asyncio.run(scenario())


def test_prompt_logprobs_come_with_the_first_event(
    running: Any, fake_runner: Any, make_request: Any, oracle_logits: Any
) -> None:
    prompt = list(b"some prompt that is chunked")

    def expected(i: int) -> torch.Tensor:
        return torch.from_numpy(oracle_logits(prompt[:i])).double().log_softmax(-1)

    async def scenario() -> None:
        config = {"max_num_seqs": 4, "max_num_batched_tokens": 7}
        async with running(fake_runner(), **config) as engine:
            await collect(engine, make_request(prompt, max_tokens=2))  # fills the prefix cache
            options = {"prompt_logprobs": 2, "logprobs": 1}
            events = await collect(engine, make_request(prompt, max_tokens=3, **options))
            zero = await collect(engine, make_request(prompt, max_tokens=0, prompt_logprobs=2))
            one = await collect(engine, make_request(prompt[:1], max_tokens=1, prompt_logprobs=0))
        first = events[0]
        assert first.prompt_logprobs is not None
        assert first.prompt_top_logprobs is not None
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(first.prompt_top_logprobs) == len(prompt)
        for i in range(1, len(prompt)):
            own = first.prompt_logprobs[i]
            assert own is not None
            assert own.token_id == prompt[i]
            assert own.logprob == pytest.approx(float(expected(i)[prompt[i]]), abs=1e-5)
            top = [t.token_id for t in first.prompt_top_logprobs[i]]
            assert top == expected(i).topk(2).indices.tolist()
        assert all(e.prompt_logprobs is None for e in events[1:])
        assert all(len(e.top_logprobs) == 1 for e in events)
        assert (zero[0].finish_reason, zero[0].token_id, len(zero)) == ("length", None, 1)
        assert zero[0].prompt_logprobs == first.prompt_logprobs
        assert one[0].prompt_logprobs == (None,)

    asyncio.run(scenario())


@pytest.mark.parametrize("after", [0, 1, 5])
def test_closing_the_stream_frees_everything(
    after: int, running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        async with running(fake_runner(max_model_len=5000, num_blocks=2000)) as engine:
            request = make_request("x" * 30, max_tokens=4000)
            async with aclosing(engine.generate(request)) as stream:
                for _ in range(after):
                    await anext(stream)
            await asyncio.wait_for(engine.drain(), 60)
            assert engine.stats().generated_tokens < 4000

    asyncio.run(scenario())


def test_cancelling_the_task_cancels_a_waiting_and_a_running_request(
    running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        runner = fake_runner(max_model_len=9000, num_blocks=3000)
        async with running(runner, max_num_seqs=1) as engine:
            tasks = [
                asyncio.ensure_future(
                    collect(engine, make_request("x" * 9, f"{i}", max_tokens=8000))
                )
                for i in range(2)
            ]
            while engine.stats().generated_tokens < 3:
                await asyncio.sleep(0.001)
            for task in reversed(tasks):  # the waiting one first
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results)
            await asyncio.wait_for(engine.drain(), 60)

    asyncio.run(scenario())


def test_a_full_queue_refuses_with_a_time(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    gate = Gate()

    async def scenario() -> None:
        runner = fake_runner(on_execute=gate)
        async with running(runner, max_num_seqs=2, max_waiting=3) as engine:
            requests = [make_request(f"p{i}", f"{i}", max_tokens=3) for i in range(200)]
            tasks = [asyncio.ensure_future(collect(engine, r)) for r in requests]
            await asyncio.to_thread(gate.reached.wait, 60)
            await asyncio.sleep(0.05)
            gate.opened.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            full = [r for r in results if isinstance(r, QueueFullError)]
            assert len(full) == 200 - 5  # 2 run, 3 wait
            assert all(1 <= error.retry_after_s <= 600 for error in full)
            for i, result in enumerate(results):
                if isinstance(result, list):
                    assert tokens(result) == oracle(f"p{i}".encode(), 3)
            later = await collect(engine, make_request("again", max_tokens=3))
            assert tokens(later) == oracle(b"again", 3)

    asyncio.run(scenario())


def test_200_requests_on_a_tiny_cache(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    async def scenario() -> None:
        async with running(fake_runner(num_blocks=20), max_num_seqs=8) as engine:
            requests = [make_request(f"request {i}", f"{i}", max_tokens=10) for i in range(200)]
            done = await generate_all(engine, requests, max_in_flight=200)
            for i, completion in enumerate(done):
                assert list(completion.token_ids) == oracle(f"request {i}".encode(), 10)
            assert engine.stats().preemptions > 0

    asyncio.run(scenario())


def test_a_deadline_ends_a_request_with_an_error(
    running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        runner = fake_runner(
            max_model_len=9000, num_blocks=3000, on_execute=lambda _: time.sleep(0.002)
        )
        async with running(runner) as engine:
            events = await collect(engine, make_request("x", max_tokens=8000, deadline_s=0.1))
            assert events[-1].finish_reason == "error"
            assert "deadline of 0.1 s" in (events[-1].error or "")
            assert events[-1].fault == "deadline"
            assert len(events) < 1000

    asyncio.run(scenario())


def test_a_dead_runner_ends_everyone_with_the_cause(
    make_engine: Any, fake_runner: Any, make_request: Any
) -> None:
    def fail_at_5(step: int) -> None:
        if step == 5:
            raise RuntimeError("the device is on fire")

    async def scenario() -> None:
        runner = fake_runner(on_execute=fail_at_5)
        engine = make_engine(runner, max_num_seqs=2)
        tasks = [
            asyncio.ensure_future(collect(engine, make_request("x", f"{i}", max_tokens=50)))
            for i in range(4)  # two run, two wait
        ]
        for events in await asyncio.gather(*tasks):
            assert events[-1].finish_reason == "error"
            assert "RuntimeError: the device is on fire" in (events[-1].error or "")
            assert events[-1].fault == "engine"
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            await collect(engine, make_request("x"))
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineDeadError, match="on fire"):
            await engine.embed([[1]])
        with pytest.raises(EngineDeadError, match="on fire"):
            await engine.check_ready(1)
        with pytest.raises(EngineDeadError, match="on fire"):
            engine.stats()  # or a dead engine would look idle
        await asyncio.wait_for(engine.drain(), 60)
        await engine.close()
        assert runner.is_closed

    asyncio.run(scenario())


def test_close_cancels_what_is_live_and_refuses_what_comes(
    make_engine: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        engine = make_engine(fake_runner(max_model_len=9000, num_blocks=3000))
        task = asyncio.ensure_future(collect(engine, make_request("x", max_tokens=8000)))
        while engine.stats().generated_tokens < 3:
            await asyncio.sleep(0.001)
        await engine.close()
        assert (await task)[-1].finish_reason == "cancelled"
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(engine, make_request("x"))
        await engine.close()

    asyncio.run(scenario())


def test_readiness_idle_busy_stuck_and_broken(
    make_engine: Any, running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        runner = fake_runner()
        async with running(runner) as engine:
            await engine.check_ready(60)
            assert runner.batches == [(0, 1, 1)]
            task = asyncio.ensure_future(collect(engine, make_request("x", max_tokens=200)))
            await asyncio.sleep(0.01)
            await engine.check_ready(60)
            await task
        gate = Gate()
        async with running(fake_runner(on_execute=gate)) as engine:
            with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
                await engine.check_ready(0.05)
            gate.opened.set()
            await engine.check_ready(60)
        async with running(fake_runner(change=lambda _, x: x * float("nan"))) as engine:
            with pytest.raises(EngineDeadError, match="not finite"):
                await engine.check_ready(60)

    asyncio.run(scenario())


def test_a_nan_row_ends_its_request_and_no_other(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    def spoil(count: int, logits: torch.Tensor) -> torch.Tensor:
        if count == 4:
            logits[1] = float("nan")
        return logits

    async def scenario() -> None:
        gate = Gate()
        async with running(fake_runner(change=spoil, on_execute=gate)) as engine:
            tasks = [
                asyncio.ensure_future(collect(engine, make_request(f"p{i}", f"{i}", max_tokens=9)))
                for i in range(3)
            ]
            await asyncio.sleep(0.05)
            gate.opened.set()
            results = await asyncio.gather(*tasks)
        failed = [i for i, events in enumerate(results) if events[-1].finish_reason == "error"]
        assert len(failed) == 1
        assert "must be finite, found nan" in (results[failed[0]][-1].error or "")
        assert results[failed[0]][-1].fault == "server"
        for i in {0, 1, 2} - set(failed):
            assert tokens(results[i]) == oracle(f"p{i}".encode(), 9)

    asyncio.run(scenario())


def test_embeddings_between_steps(running: Any, fake_runner: Any, make_request: Any) -> None:
    async def scenario() -> None:
        async with running(fake_runner()) as engine:
            task = asyncio.ensure_future(collect(engine, make_request("x", max_tokens=50)))
            assert await engine.embed([[1, 2, 3], [9]]) == [[3.0, 6.0], [1.0, 9.0]]
            await task
            with pytest.raises(RequestRefusedError, match="at least one token"):
                await engine.embed([[]])
            with pytest.raises(RequestRefusedError, match="found 999"):
                await engine.embed([[999]])

    asyncio.run(scenario())


def test_structured_output_beside_free_text(
    running: Any, fake_runner: Any, make_request: Any, oracle: Any
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))

    async def scenario() -> None:
        async with running(fake_runner()) as engine:
            free = asyncio.ensure_future(collect(engine, make_request("p", "free", max_tokens=30)))
            options = {"grammar": spec, "max_tokens": 200, "ignore_eos": False}
            events = await collect(engine, make_request("json", "json", **options))
            assert events[-1].finish_reason == "stop"
            assert 0 <= json.loads("".join(e.text for e in events))["n"] <= 99
            assert tokens(await free) == oracle(b"p", 30)
            bad = GrammarSpec(kind="regex", text="(")
            with pytest.raises(RequestRefusedError, match="unclosed"):
                await collect(engine, make_request("x", grammar=bad))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1, 272]}, "found 272"),
        ({"prompt": [-1]}, "found -1"),
        ({"prompt": [1] * 256}, "at most 255 tokens"),
        ({"prompt": [1] * 200, "max_tokens": 100}, "KV blocks"),
        ({"temperature": float("nan")}, "temperature: must be between 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p: must be above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {272: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "must be finite"),
        ({"stop_token_ids": frozenset({-5})}, "stop_token_ids"),
        ({"stop_strings": ("",)}, "empty string"),
        ({"logprobs": 999}, "logprobs"),
        ({"deadline_s": -1.0}, "deadline_s"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    options: dict[str, Any], match: str, running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        async with running(fake_runner(num_blocks=50)) as engine:
            with pytest.raises(RequestRefusedError, match=match):
                await collect(engine, make_request(options.pop("prompt", [1]), **options))

    asyncio.run(scenario())


def test_a_request_id_in_use_is_refused(running: Any, fake_runner: Any, make_request: Any) -> None:
    async def scenario() -> None:
        async with running(fake_runner()) as engine:
            async with aclosing(engine.generate(make_request("a", "same"))) as stream:
                await anext(stream)
                with pytest.raises(RequestRefusedError, match="in use"):
                    await collect(engine, make_request("b", "same"))
            assert len(await collect(engine, make_request("b", "same", max_tokens=4))) == 4

    asyncio.run(scenario())


def test_a_reader_whose_loop_is_gone_is_cancelled(
    make_engine: Any, fake_runner: Any, make_request: Any
) -> None:
    engine = make_engine(fake_runner(max_model_len=9000, num_blocks=3000))
    loop = asyncio.new_event_loop()
    stream = engine.generate(make_request("x", max_tokens=8000))
    loop.run_until_complete(anext(stream))
    loop.close()  # with the stream open
    end = time.monotonic() + 60
    while engine.stats().running and time.monotonic() < end:
        time.sleep(0.01)
    assert (engine.stats().running, engine.stats().kv_blocks_used) == (0, 0)
    asyncio.run(engine.close())


def test_an_idle_engine_uses_no_time(running: Any, fake_runner: Any, make_request: Any) -> None:
    async def scenario() -> None:
        async with running(fake_runner()) as engine:
            await collect(engine, make_request("x", max_tokens=3))
            # Of its own thread: libraries' idle workers of other tests may spin for a while.
            clock = time.pthread_getcpuclockid(engine._thread.ident)
            steps, cpu = engine.stats().steps, time.clock_gettime(clock)
            await asyncio.sleep(0.5)
            assert engine.stats().steps == steps
            assert time.clock_gettime(clock) - cpu < 0.1

    asyncio.run(scenario())


def test_seeded_sampling_ignores_neighbours_and_preemption(
    running: Any, fake_runner: Any, make_request: Any
) -> None:
    async def scenario() -> None:
        options = {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 7}
        async with running(fake_runner()) as engine:
            alone = tokens(await collect(engine, make_request("seeded", **options)))
        async with running(fake_runner(num_blocks=12), max_num_seqs=6) as engine:
            requests = [
                make_request("seeded", f"{i}", **{**options, "seed": 7 if i == 4 else i + 50})
                for i in range(6)
            ]
            done = await generate_all(engine, requests)
            assert engine.stats().preemptions > 0
            assert list(done[4].token_ids) == alone
            assert len({d.token_ids for d in done}) == 6

    asyncio.run(scenario())
