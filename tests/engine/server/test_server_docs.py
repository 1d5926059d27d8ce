"""docs/server.md names every endpoint and every field of a request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hal_engine.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest

DOCUMENT = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")

# Fields with OpenAI's meaning, which OpenAI's documentation explains.
OPENAI_FIELDS = {
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "echo",
    "logprobs",
    "top_logprobs",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logit_bias",
    "response_format",
    "encoding_format",
}


def test_endpoints(server: Any) -> None:
    with server.http() as http:
        paths = http.get("/").json()["endpoints"]
    assert paths
    for path in paths:
        name = path.replace("{model:path}", "{model}")
        assert re.search(rf"(GET|POST) {re.escape(name)}`", DOCUMENT), path


def test_fields() -> None:
    requests = (ChatRequest, CompletionRequest, EmbeddingRequest)
    fields = {name for request in requests for name in request.model_fields}
    assert fields > OPENAI_FIELDS
    missing = {name for name in fields - OPENAI_FIELDS if f"`{name}`" not in DOCUMENT}
    assert not missing
