"""The `openai` client, unchanged, against the server; shapes checked against the client's types."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import openai
import pytest
from openai.types import (
    Completion,
    CreateEmbeddingResponse,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MODEL = "fake/model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return server.openai()


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert [m.id for m in listed.data] == [MODEL]
    for model in [*listed.data, client.models.retrieve(MODEL)]:
        Model.model_validate(model.model_dump(), strict=True)
        assert model.object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat(client: openai.OpenAI, fake: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_completion_tokens=10, temperature=0
    )
    assert raw.headers["x-hal-plan"] == "0123456789abcdef0123456789abcdef"
    assert raw.headers["x-request-id"]
    assert "server" not in raw.headers
    answer = ChatCompletion.model_validate_json(raw.text, strict=True)
    assert answer.choices[0].message.content == fake.ANSWER.encode()[:10].decode()
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = 1 + len("user: Hello\n")
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == prompt_tokens + 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream_equals_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "n": 3}
    whole = client.chat.completions.create(**options, seed=5)
    stream = client.chat.completions.create(
        **options, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert len(set(texts)) == 3  # each copy draws with a seed of its own
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in chunks[:-1])


def test_chat_stream_without_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_chat_message_shapes(client: openai.OpenAI, server: Any) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    messages: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "go on", "name": "ann"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3)
    rendered = bytes(i for i in server.engine.requests[-1].prompt_token_ids if i < 256).decode()
    assert rendered.startswith("system: be kind\nuser: a\nb\nassistant: D")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, logprobs=True, top_logprobs=2
    )
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 16
    assert logprobs.content[1].token == "bytes:\\xc3"
    assert logprobs.content[1].bytes == [0xC3]
    assert logprobs.content[0].token == "D"
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 16
    assert logprobs.content[0].top_logprobs[0].logprob == -0.125
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=16, logprobs=True, top_logprobs=2, stream=True
    )
    entries = [
        entry
        for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [e.model_dump() for e in entries] == [e.model_dump() for e in logprobs.content]


def test_minus_infinity_becomes_a_number(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, logprobs=True
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    assert any(entry.logprob == -9999.0 and entry.token == "q" for entry in content)
    assert all(math.isfinite(entry.logprob) for entry in content)


@pytest.mark.parametrize(
    "prompt",
    ["Once", ["Once", "Twice"], [79, 110], [[79, 110], [84, 119]]],
    ids=["text", "texts", "ids", "lists-of-ids"],
)
def test_completions_prompts(client: openai.OpenAI, server: Any, prompt: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, n=2)
    Completion.model_validate(answer.model_dump(), strict=True)
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [c.index for c in answer.choices] == list(range(2 * count))
    assert all(c.text == "Déjà" for c in answer.choices)
    sent = server.engine.requests[-2 * count :]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(r.prompt_token_ids) for r in sent) // 2
    assert answer.usage.completion_tokens == 6 * 2 * count


def test_completions_default_length_is_16(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_completions_stream_equals_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["one", "two"],
        "max_tokens": 30,
        "n": 2,
        "seed": 9,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    texts = [""] * 4
    tokens: list[list[str]] = [[], [], [], []]
    offsets: list[list[int]] = [[], [], [], []]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.tokens or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [c.text for c in whole.choices]
    assert texts[0].startswith("one")
    assert texts[2].startswith("two")
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == tokens[choice.index]
        assert choice.logprobs.text_offset == offsets[choice.index]
    assert chunks[-1].usage == whole.usage


def test_completions_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=16, logprobs=2)
    Completion.model_validate(answer.model_dump(), strict=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == 16
    assert all(len(top) == 3 for top in logprobs.top_logprobs)  # two best and the drawn one
    text = answer.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset] == token


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    """`echo` with `max_tokens` 0 scores the prompt and generates nothing."""
    answer = client.completions.create(
        model=MODEL, prompt="score me", max_tokens=0, echo=True, logprobs=0
    )
    choice = answer.choices[0]
    assert choice.text == "score me"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<256>", *"score me"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_best_of_keeps_the_likeliest(client: openai.OpenAI, server: Any) -> None:
    before = len(server.engine.requests)
    options: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1, "seed": 3}
    answer = client.completions.create(**options, best_of=6, n=2)
    assert len(server.engine.requests) == before + 6
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    every = client.completions.create(**options, n=6, logprobs=0)
    scored = sorted(
        ((c.logprobs.token_logprobs[0], c.text) for c in every.choices if c.logprobs),
        key=lambda pair: -pair[0],
    )
    assert [c.text for c in answer.choices] == [text for _, text in scored[:2]]


def test_sampling_parameters_reach_the_engine(client: openai.OpenAI, server: Any) -> None:
    client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=-1.5,
        frequency_penalty=2,
        logit_bias={"65": 3, "66": -100},
        seed=-1,
        stop=["\n\n", "END"],
        user="u-1",
        extra_body={
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "guided_choice": ["yes", "no"],
        },
    )
    request = server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 2)
    assert sampling.logit_bias == {65: 3, 66: -100}
    assert sampling.seed == 2**63 - 1
    assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
    assert sampling.stop_strings == ("\n\n", "END")
    assert sampling.stop_token_ids == {3, 4}
    assert sampling.ignore_eos
    assert sampling.logprobs is None
    assert request.grammar.kind == "choice"
    assert request.grammar.text == '["yes", "no"]'
    assert 0 < request.deadline_s <= server.state.config.request_deadline_s


def test_defaults_are_openais(client: openai.OpenAI, server: Any) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO)
    request = server.engine.requests[-1]
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    room = server.engine.max_model_len - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == room
    assert request.grammar is None


def test_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=50, stop="quick")
    assert answer.choices[0].finish_reason == "stop"
    assert "quick" not in answer.choices[0].text


@pytest.mark.parametrize(
    ("response_format", "kind", "text"),
    [
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}},
            "json_schema",
            '{"type": "null"}',
        ),
    ],
    ids=["text", "json_object", "json_schema"],
)
def test_response_format(
    client: openai.OpenAI, server: Any, response_format: Any, kind: str | None, text: str | None
) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, response_format=response_format
    )
    grammar = server.engine.requests[-1].grammar
    assert (grammar and grammar.kind, grammar and grammar.text) == (kind, text)


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["a", "bc"])  # base64 on the wire
    CreateEmbeddingResponse.model_validate(answer.model_dump(), strict=True)
    assert [d.embedding for d in answer.data] == [[2, 0.5, -1.25], [3, 0.5, -1.25]]
    assert answer.usage.prompt_tokens == 5
    plain = client.embeddings.create(model=MODEL, input=[1, 2, 3], encoding_format="float")
    assert plain.data[0].embedding == [3, 0.5, -1.25]
    raw = client.embeddings.with_raw_response.create(
        model=MODEL, input="a", encoding_format="base64"
    )
    packed = base64.b64decode(raw.http_response.json()["data"][0]["embedding"])
    assert struct.unpack("<3f", packed) == (2, 0.5, -1.25)


def test_embeddings_refused_by_a_model_without(start_server: Any, fake: Any) -> None:
    server = start_server(fake.FakeEngine(embeddings=False))
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().embeddings.create(model=MODEL, input="a")
    assert caught.value.code == "embeddings_not_supported"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("word", "error", "status", "code"),
    [
        ("!queue", openai.RateLimitError, 429, "queue_full"),
        ("!refuse", openai.BadRequestError, 400, "request_refused"),
        ("!dead", openai.InternalServerError, 503, "engine_unavailable"),
        ("!crash", openai.InternalServerError, 500, "internal_error"),
        ("!template", openai.BadRequestError, 400, "invalid_value"),
    ],
)
def test_engine_errors(
    client: openai.OpenAI,
    fake: Any,
    word: str,
    error: type[openai.APIStatusError],
    status: int,
    code: str,
    stream: bool,
) -> None:
    messages: Any = [{"role": "user", "content": word}]
    with pytest.raises(error) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert fake.SECRET_DETAIL not in str(caught.value.response.text)
    if word == "!queue":
        assert caught.value.response.headers["retry-after"] == "3"


def test_a_failed_generation_is_not_retried(client: openai.OpenAI, server: Any) -> None:
    """The engine runs it once, though OpenAI's client retries a plain 500."""
    before = len(server.engine.requests)
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=2).completions.create(
            model=MODEL, prompt="!mid_error", max_tokens=9
        )
    assert caught.value.code == "generation_failed"
    assert len(server.engine.requests) == before + 1


@pytest.mark.parametrize("word", ["!mid_error", "!mid_crash", "!mid_dead"])
def test_errors_after_some_tokens(client: openai.OpenAI, fake: Any, word: str) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=MODEL, prompt=word, max_tokens=9)
    assert fake.SECRET_DETAIL not in caught.value.response.text
    texts = []
    stream = client.completions.create(model=MODEL, prompt=word, max_tokens=9, stream=True)
    with pytest.raises(openai.APIError) as streamed:
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert "".join(texts) == "Dé"
    assert fake.SECRET_DETAIL not in str(streamed.value.body)


def _outcomes(server: Any, outcome: str) -> float:
    labels = {"endpoint": "/v1/completions", "outcome": outcome}
    return server.state.metrics.registry.get_sample_value("hal_requests_total", labels) or 0.0


@pytest.mark.parametrize(
    ("word", "status", "type_", "code", "outcome"),
    [
        ("!mid_request", 400, "invalid_request_error", "request_refused", "client_error"),
        ("!mid_deadline", 504, "timeout_error", "deadline_exceeded", "deadline"),
        ("!mid_error", 500, "server_error", "generation_failed", "error"),
        ("!mid_crash", 500, "server_error", "internal_error", "error"),
        ("!mid_dead", 503, "server_error", "engine_unavailable", "overload"),
    ],
)
def test_whose_fault_it_is(
    server: Any,
    assert_api_error: Any,
    word: str,
    status: int,
    type_: str,
    code: str,
    outcome: str,
) -> None:
    """The same error whole and streamed; only where a retry may help are clients let to try."""
    body = {"model": MODEL, "prompt": word, "max_tokens": 9}
    before = _outcomes(server, outcome)
    with server.http() as http:
        whole = http.post("/v1/completions", json=body)
        streamed = http.post("/v1/completions", json={**body, "stream": True})
    error = assert_api_error(whole, status)
    assert (error["type"], error["code"]) == (type_, code)
    is_hopeless = code in ("deadline_exceeded", "generation_failed")
    assert whole.headers.get("x-should-retry") == ("false" if is_hopeless else None)
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert json.loads(events[-1]) == {"error": error}
    assert all("error" not in json.loads(event) for event in events[:-1])
    server.wait(lambda: _outcomes(server, outcome) == before + 2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_death_amid_tokens(start_server: Any, fake: Any, stream: bool) -> None:
    """The last words of a dying engine hold its cause; the client learns that it is gone."""
    server = start_server()
    client = server.openai()

    def ask() -> list[Any]:
        return list(
            client.completions.create(model=MODEL, prompt="!mid_dying", max_tokens=9, stream=stream)
        )

    with pytest.raises(openai.APIError) as caught:
        ask()
    assert "engine has stopped" in str(caught.value)
    assert fake.SECRET_DETAIL not in str(caught.value.body)


def test_stream_bytes(server: Any) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True}
    with server.http() as http:
        response = http.post("/v1/completions", json=body)
        failed = http.post(
            "/v1/completions", json={**body, "prompt": "!mid_crash", "max_tokens": 9}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-hal-plan"]
    assert response.headers["x-request-id"]
    lines = response.text.split("\n\n")
    assert all(line.startswith("data: ") for line in lines[:-1])
    assert lines[-2:] == ["data: [DONE]", ""]
    assert failed.status_code == 200
    assert '"error"' in failed.text.rstrip().rsplit("\n\n", 1)[-1]
    assert "[DONE]" not in failed.text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"model": "gpt-9"}, "model"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"max_tokens": 1999}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(client: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **options})
    assert caught.value.param == param
    if param == "temprature":
        assert "temperature" in str(caught.value)
    if param in ("messages", "max_tokens"):
        assert caught.value.code == "context_length_exceeded"
