"""/v1/embeddings: https://platform.openai.com/docs/api-reference/embeddings."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.server.endpoint import json_response, read_request, remaining_deadline_s
from hal_engine.server.errors import ApiError, deadline_exceeded, unsupported
from hal_engine.server.generation import until_disconnect
from hal_engine.server.prompts import encode_prompts
from hal_engine.server.protocol import EmbeddingRequest
from hal_engine.server.state import check_model, state_of


async def embeddings(request: Request) -> Response:
    """Embeddings, if the model makes them. `encoding_format` "base64" is little-endian float32."""
    state = state_of(request)
    body = await read_request(request, EmbeddingRequest)
    check_model(body.model, state)
    if not state.engine.supports_embeddings:
        raise ApiError(
            400,
            f"The model '{state.engine.model_id}' makes no embeddings.",
            param="model",
            code="embeddings_not_supported",
        )
    if body.dimensions is not None:
        raise unsupported("dimensions", "'dimensions' is not supported by this model.")
    prompts = await encode_prompts(
        body.input,
        state.engine.tokenizer,
        param="input",
        max_prompts=state.config.max_prompts,
        max_tokens=state.engine.max_model_len,
        add_special_tokens=True,
        parse_special=False,
    )
    ids = [prompt.token_ids for prompt in prompts]
    try:
        async with asyncio.timeout(remaining_deadline_s(request, state)):
            vectors = await until_disconnect(request.receive, state.engine.embed(ids))
    except TimeoutError as error:
        raise deadline_exceeded(state.config.request_deadline_s) from error
    num_tokens = sum(map(len, ids))
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(body, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _encoded(body: EmbeddingRequest, vector: list[float]) -> Any:
    if body.encoding_format != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
