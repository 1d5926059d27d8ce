"""Errors amid a generation, from the engine's own scheduler, sampler and grammars to the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hal_engine.structured_output import GrammarLimits

# The automaton of this expression doubles with each step of the repetition: no text of it is long
# enough to be over before a small limit is met.
GROWING = r"([ab]*a[ab]{40}c)+"
BODY = {"model": "fake", "prompt": "p", "max_tokens": 60, "temperature": 0}


@pytest.fixture
def serve(start_server: Any, make_engine: Any, fake_runner: Any) -> Iterator[Callable[..., Any]]:
    """`serve(grammar_limits=…, runner=…, settings=…)`: a server whose engine is the real one."""
    engines: list[Any] = []

    def start(
        grammar_limits: GrammarLimits | None = None,
        runner: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        engine = make_engine(fake_runner(**(runner or {})), grammar_limits=grammar_limits)
        engines.append(engine)
        return start_server(engine, **settings)

    yield start
    for engine in engines:
        asyncio.run(engine.close())


def _errors(server: Any, body: dict[str, Any], assert_api_error: Any, status: int) -> list[Any]:
    """The error as a response and as the end of a stream."""
    with server.http() as http:
        whole = http.post("/v1/completions", json=body)
        streamed = http.post("/v1/completions", json={**body, "stream": True})
    found = [assert_api_error(whole, status)]
    if streamed.status_code != 200:  # it ended before its first token
        return [*found, assert_api_error(streamed, status)]
    assert "[DONE]" not in streamed.text
    last = streamed.text.rstrip().rsplit("\n\n", 1)[-1]
    return [*found, json.loads(last.removeprefix("data: "))["error"]]


def test_a_grammar_that_meets_its_limits_is_a_400(serve: Any, assert_api_error: Any) -> None:
    server = serve(GrammarLimits(max_lexer_states=120))
    body = {**BODY, "guided_regex": GROWING}
    for error in _errors(server, body, assert_api_error, 400):
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "request_refused"
        assert error["message"].startswith("structured output: ")
    assert server.engine.stats().generated_tokens > 2, "refused before it ran: no test of this"
    assert server.engine.stats().kv_blocks_used == 0
    with server.http() as http:  # the engine is as well as before
        assert http.post("/v1/completions", json=BODY).status_code == 200


def test_no_token_left_is_a_400(serve: Any, assert_api_error: Any) -> None:
    """The only way on is a stop token, which min_tokens does not allow yet."""
    stop = {"stop_token_ids": [ord("e")], "min_tokens": 5}
    body = {**BODY, "guided_choice": ["yes"], **stop}
    for error in _errors(serve(), body, assert_api_error, 400):
        assert error["code"] == "request_refused"
        assert "min_tokens" in error["message"]


def test_broken_numbers_are_a_500(serve: Any, assert_api_error: Any) -> None:
    def spoil(count: int, logits: torch.Tensor) -> torch.Tensor:
        return logits * float("nan") if len(logits) == 1 and count % 4 == 0 else logits

    server = serve(runner={"change": spoil})
    for error in _errors(server, BODY, assert_api_error, 500):
        assert error["code"] == "generation_failed"
        assert "must be finite" in error["message"]


def test_the_engines_own_deadline_is_a_504(serve: Any, assert_api_error: Any) -> None:
    """However late the server's own clock would have seen it."""
    slow = {"on_execute": lambda _: time.sleep(0.05)}
    server = serve(runner=slow, request_deadline_s=0.3)
    for error in _errors(server, BODY, assert_api_error, 504):
        assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")


def test_a_dead_engine_is_a_503_without_its_cause(serve: Any, assert_api_error: Any) -> None:
    def die(step: int) -> None:
        if step == 3:
            raise RuntimeError("secret cause")

    server = serve(runner={"on_execute": die})
    for error in _errors(server, BODY, assert_api_error, 503):
        assert error["code"] == "engine_unavailable"
        assert "secret" not in error["message"]
