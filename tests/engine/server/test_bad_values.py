"""Hostile values in every field: answered with 200 or with a 4xx in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

MODEL = "fake/model"

# As JSON source, because most of these cannot be written by a JSON encoder.
VALUES = {
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e999": "1e999",
    "-1e999": "-1e999",
    "-1": "-1",
    "0": "0",
    "2^31": str(2**31),
    "2^63": str(2**63),
    "10^400": "1" + "0" * 400,
    "true": "true",
    '"2"': '"2"',
    "surrogate": '"\\ud800"',
}
SAMPLING_FIELDS = [
    "model",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "stop",
    "logit_bias",
    "response_format",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "guided_regex",
    "guided_choice",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "logprobs",
]
CHAT_FIELDS = [
    *SAMPLING_FIELDS,
    *[
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "parallel_tool_calls",
        "modalities",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "moderation",
    ],
    # Within nested objects
    *["messages.0.role", "messages.0.content", "messages.0.name", "messages.0.tool_calls"],
    *["messages.0.function_call", "messages.0.audio", "messages.0.refusal"],
    *["messages.0.annotations", "messages.0.tool_call_id"],
    *["messages.0.content.0", "messages.0.content.0.text", "messages.0.content.0.type"],
    *["stream_options.include_usage", "response_format.type", "response_format.json_schema"],
    *["response_format.json_schema.name", "response_format.json_schema.schema"],
    *["logit_bias.65", "stop.0", "stop_token_ids.0", "guided_choice.0", "metadata.key"],
]
COMPLETION_FIELDS = [
    *SAMPLING_FIELDS,
    *["prompt", "best_of", "echo", "suffix", "add_special_tokens", "parse_special"],
    *["prompt.0", "prompt.0.0", "stop.0", "stop_token_ids.0", "logit_bias.65"],
]
EMBEDDING_FIELDS = [
    "model",
    "input",
    "encoding_format",
    "dimensions",
    "user",
    "input.0",
    "input.0.0",
]

NUMBERS_ACCEPTED = {
    "n": {},
    "temperature": {"0"},
    "top_p": {"0"},
    "presence_penalty": {"-1", "0"},
    "frequency_penalty": {"-1", "0"},
    "seed": {"-1", "0", "2^31"},
    "top_k": {"-1", "0"},  # off
    "min_p": {"0"},
    "min_tokens": {"0"},
    "logit_bias.65": {"-1", "0"},
    "stop_token_ids.0": {"0"},
    "stream": {"true"},
    "ignore_eos": {"true"},
    "stop": {'"2"'},
    "stop.0": {'"2"'},
    "guided_regex": {'"2"'},
    "guided_choice.0": {'"2"'},
    "metadata.key": {'"2"'},
    "user": {'"2"'},
    "safety_identifier": {'"2"'},
    "prompt_cache_key": {'"2"'},
    "prompt_cache_retention": {'"2"'},
}
ACCEPTED = {
    "/v1/chat/completions": {
        **NUMBERS_ACCEPTED,
        "logprobs": {"true"},
        "top_logprobs": {"0"},
        "parallel_tool_calls": {"true"},
        "messages.0.content": {'"2"'},
        "messages.0.name": {'"2"'},
        "messages.0.refusal": {'"2"'},
        "messages.0.tool_call_id": {'"2"'},
        "messages.0.content.0.text": {'"2"'},
        "stream_options.include_usage": {"true"},
        "response_format.json_schema.name": {'"2"'},
    },
    "/v1/completions": {
        **NUMBERS_ACCEPTED,
        "logprobs": {"0"},
        "echo": {"true"},
        "add_special_tokens": {"true"},
        "parse_special": {"true"},
        "prompt": {'"2"'},
        "prompt.0": {"0", '"2"'},
        "prompt.0.0": {"0"},
    },
    "/v1/embeddings": {
        "user": {'"2"'},
        "input": {'"2"'},
        "input.0": {"0", '"2"'},
        "input.0.0": {"0"},
    },
}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
    },
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"model": MODEL, "input": "hi"},
}
CASES = [
    *(("/v1/chat/completions", field) for field in CHAT_FIELDS),
    *(("/v1/completions", field) for field in COMPLETION_FIELDS),
    *(("/v1/embeddings", field) for field in EMBEDDING_FIELDS),
]
PLACEHOLDER = "<<here>>"


def _document(path: str, field: str) -> str:
    """The endpoint's smallest valid body with a placeholder at `field`."""
    body: Any = json.loads(json.dumps(BASES[path]))
    surroundings: dict[str, Any] = {
        "messages.0.content.0": [],
        "messages.0.content.0.text": [{"type": "text", "text": "x"}],
        "messages.0.content.0.type": [{"type": "text", "text": "x"}],
    }
    if field in surroundings:
        body["messages"][0]["content"] = surroundings[field]
    if field.startswith("response_format.json_schema"):
        schema = {"name": "a", "schema": {"type": "object"}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if field.startswith("stream_options"):
        body["stream"] = True
    parts = field.split(".")
    if parts[0] in ("prompt", "input") and len(parts) > 1:
        body[parts[0]] = []
    target = body
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        value: Any = PLACEHOLDER if following is None else [] if following.isdigit() else {}
        if following == "65":
            value = {}
        if isinstance(target, list):
            if following is None or len(target) <= int(part):
                target[int(part) : int(part) + 1] = [value]
            target = target[int(part)]
        else:
            if following is None or part not in target:
                target[part] = value
            target = target[part]
    return json.dumps(body)


@pytest.mark.parametrize(("path", "field"), CASES, ids=lambda text: str(text).lstrip("/"))
def test_every_bad_value_in_every_field(
    server: Any, assert_api_error: Any, path: str, field: str
) -> None:
    document = _document(path, field)
    assert document.count(PLACEHOLDER) == 1
    accepted = set()
    with server.http(headers={"content-type": "application/json"}) as http:
        for name, source in VALUES.items():
            body = document.replace(json.dumps(PLACEHOLDER), source)
            response = http.post(path, content=body)
            if response.status_code == 200:
                accepted.add(name)
                assert '{"error":' not in response.text
            else:
                assert 400 <= response.status_code < 500, (name, response.text)
                assert_api_error(response)
    assert accepted == set(ACCEPTED[path].get(field, ()))


def test_every_field_is_in_the_matrix() -> None:
    from hal_engine.server import protocol

    fields = {
        "/v1/chat/completions": (protocol.ChatRequest, CHAT_FIELDS),
        "/v1/completions": (protocol.CompletionRequest, COMPLETION_FIELDS),
        "/v1/embeddings": (protocol.EmbeddingRequest, EMBEDDING_FIELDS),
    }
    for model, tested in fields.values():
        assert set(model.model_fields) <= set(tested)


MANY = 2000


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/completions", {"stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
        ("/v1/completions", {"guided_choice": ["x", *[0] * MANY]}, "guided_choice[1]"),
        ("/v1/completions", {"logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias.0"),
        ("/v1/completions", {"metadata": {str(i): i for i in range(MANY)}}, "metadata.0"),
        ("/v1/completions", {f"x{i}": i for i in range(MANY)}, "x0"),
        ("/v1/chat/completions", {"modalities": [1] * MANY}, "modalities[0]"),
        ("/v1/chat/completions", {"messages": [0] * MANY}, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{}] * MANY}, "messages[0].role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", **{f"x{i}": 0 for i in range(MANY)}}] * MANY},
            "messages[0].x0",
        ),
        ("/v1/chat/completions", {"stream_options": dict.fromkeys("abc", 1)}, "stream_options.a"),
        ("/v1/embeddings", dict.fromkeys("abcdefgh", 1), "a"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_one_error_is_made_however_much_is_wrong(
    path: str, changes: dict[str, Any], param: str
) -> None:
    """Each takes a kilobyte: a body of 4 MiB with a million of them took gigabytes and minutes."""
    from hal_engine.server import protocol
    from hal_engine.server.errors import ApiError

    model: Any = {
        "/v1/chat/completions": protocol.ChatRequest,
        "/v1/completions": protocol.CompletionRequest,
        "/v1/embeddings": protocol.EmbeddingRequest,
    }[path]
    with pytest.raises(ApiError) as caught:
        protocol.validate_request(model, {**BASES[path], **changes})
    assert caught.value.param == param
    cause = caught.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"3", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"model": "a", "model": "b"}', "duplicate_key"),
        (b'{"model": "a", "stream_options": {"x": 1, "x": 2}}', "duplicate_key"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "duplicate_key"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'\xef\xbb\xbf{"model": "a"}', "invalid_json"),
        (b'{"\\udfff": 1}', "invalid_string"),
        (b'{"a": [{"b": "x\\uDBFFy"}]}', "invalid_string"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json"),
        (b'{"a": ' + b"[" * 1_000_000, "invalid_json"),
        (b'{"a":' * 200_000, "invalid_json"),
        (b'{"a": "' + b"[" * 1000 + b'"}', "unknown_parameter"),  # brackets in a string
        (b'{"model": "a" "b"}', "invalid_json"),
        (b'{"model": "a\nb"}', "invalid_json"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[:12].hex(),
)
def test_malformed_bodies(server: Any, assert_api_error: Any, body: bytes, code: str) -> None:
    with server.http(headers={"content-type": "application/json"}) as http:
        error = assert_api_error(http.post("/v1/completions", content=body), 400)
    assert error["code"] == code


def test_a_surrogate_pair_is_text(server: Any) -> None:
    body = b'{"model": "fake/model", "max_tokens": 2, "prompt": "\\ud83d\\ude00"}'
    with server.http(headers={"content-type": "application/json"}) as http:
        assert http.post("/v1/completions", content=body).status_code == 200
    sent = server.engine.requests[-1].prompt_token_ids
    assert bytes(sent[1:]).decode() == "\U0001f600"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
    ids=["none", "text", "form", "gzip"],
)
def test_other_content_types(server: Any, assert_api_error: Any, headers: dict[str, str]) -> None:
    with server.http() as http:
        response = http.post("/v1/completions", content=b"{}", headers=headers)
    assert_api_error(response, 415)


def test_json_with_charset_is_json(server: Any) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = json.dumps(BASES["/v1/completions"])
    with server.http() as http:
        assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt[0]"),
        ("/v1/completions", {"prompt": ["a", [1]]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1, 300]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1, True]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt[0]"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt"),
        ("/v1/completions", {"prompt": "", "add_special_tokens": False}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 64, "n": 3}, "n"),
        ("/v1/completions", {"prompt": "x" * 2000}, "prompt"),
        ("/v1/completions", {"n": 17}, "n"),
        ("/v1/completions", {"best_of": 17}, "best_of"),
        ("/v1/completions", {"n": 3, "best_of": 2}, "best_of"),
        ("/v1/completions", {"best_of": 2, "stream": True}, "best_of"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"max_tokens": 1999}, "max_tokens"),
        ("/v1/completions", {"min_tokens": 3}, "min_tokens"),
        ("/v1/completions", {"stop": ["x"] * 17}, "stop"),
        ("/v1/completions", {"stop": "x" * 257}, "stop"),
        ("/v1/completions", {"stop": ""}, "stop"),
        ("/v1/completions", {"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ("/v1/completions", {"stop_token_ids": [300]}, "stop_token_ids"),
        ("/v1/completions", {"logit_bias": {"300": 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"1": 101}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ("/v1/completions", {"guided_regex": "a" * 4097}, "guided_regex"),
        ("/v1/completions", {"guided_choice": []}, "guided_choice"),
        ("/v1/completions", {"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ("/v1/completions", {"max_token": 2}, "max_token"),
        (
            "/v1/completions",
            {"stream_options": {"include_use": True}},
            "stream_options.include_use",
        ),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": ""}]}, "messages[0]"),
        ("/v1/chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
        ("/v1/chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        ("/v1/embeddings", {"input": ["a"] * 65}, "input"),
        ("/v1/embeddings", {"input": [[1], [-1]]}, "input[1][0]"),
        ("/v1/embeddings", {"dimensions": 3}, "dimensions"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_limits_name_the_field(
    server: Any, assert_api_error: Any, path: str, change: Any, param: str
) -> None:
    with server.http() as http:
        response = http.post(path, json={**BASES[path], **change})
    assert assert_api_error(response, 400)["param"] == param


def test_oversized_schema(server: Any, assert_api_error: Any) -> None:
    schema = {"enum": ["x" * 1000 for _ in range(70)]}
    change = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with server.http() as http:
        body = {**BASES["/v1/chat/completions"], "response_format": change}
        error = assert_api_error(http.post("/v1/chat/completions", json=body), 400)
    assert error["code"] == "too_long"


def test_unknown_field_suggests_the_nearest(server: Any, assert_api_error: Any) -> None:
    with server.http() as http:
        body = {**BASES["/v1/chat/completions"], "max_completion_token": 3}
        error = assert_api_error(http.post("/v1/chat/completions", json=body), 400)
    assert "'max_completion_tokens'" in error["message"]
    assert error["code"] == "unknown_parameter"


def test_the_smallest_bodies_are_valid(server: Any) -> None:
    with server.http() as http:
        for path, body in BASES.items():
            assert http.post(path, json=body).status_code == 200, path
