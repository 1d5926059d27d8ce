"""/v1/chat/completions: https://platform.openai.com/docs/api-reference/chat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.api import TokenEvent
from hal_engine.server.endpoint import (
    Choice,
    collect,
    engine_requests,
    generation_id_of,
    json_response,
    read_request,
    remaining_deadline_s,
    unix_time,
    usage,
)
from hal_engine.server.errors import ApiError, invalid, unsupported
from hal_engine.server.generation import Generation
from hal_engine.server.json_body import json_type_name
from hal_engine.server.logprobs import chat_logprob
from hal_engine.server.parameters import (
    LengthLimits,
    check_logprobs,
    check_sequences,
    grammar_of,
    max_tokens_of,
    sampling_params,
)
from hal_engine.server.prompts import check_least_tokens, check_prompt_length
from hal_engine.server.protocol import ChatMessage, ChatRequest
from hal_engine.server.state import ServerState, state_of
from hal_engine.server.streaming import stream_response
from hal_engine.tokenizer_errors import PromptTooLongError


async def chat_completions(request: Request) -> Response:
    """Chat, streamed or not. Raises ApiError, the engine's errors and ClientDisconnected."""
    state = state_of(request)
    body = await read_request(request, ChatRequest)
    copies = body.n or 1
    check_sequences(copies, copies, 1, state.config)
    num_top = _num_top_logprobs(body, state)
    grammar = grammar_of(body, state.config)
    prompt = await _render(body, state)
    sampling = sampling_params(
        body,
        state.config,
        vocab_size=state.engine.tokenizer.vocab_size,
        max_tokens=max_tokens_of(_length_limits(body), len(prompt), state.engine.max_model_len),
        logprobs=num_top if body.logprobs else None,
    )
    requests = engine_requests(
        generation_id_of(request),
        [prompt],
        [sampling],
        grammar,
        copies=copies,
        deadline_s=remaining_deadline_s(request, state),
    )
    generation = Generation(state, requests, request.state.arrived_s)
    shape = _ChatShape(body, state, generation_id_of(request), len(prompt), num_top)
    if body.stream:
        return await stream_response(request, generation, _ChatChunks(shape))
    return json_response(shape.response(await collect(request, generation, copies)))


async def _render(body: ChatRequest, state: ServerState) -> tuple[int, ...]:
    """Token ids of the rendered messages, which leave room for at least one token."""
    tokenizer = state.engine.tokenizer
    if not tokenizer.has_chat_template:
        raise ApiError(
            400,
            f"The model '{state.engine.model_id}' has no chat template; use /v1/completions.",
            code="chat_not_supported",
        )
    if len(body.messages) > state.config.max_messages:
        raise invalid(
            f"'messages' has {len(body.messages)} entries; at most {state.config.max_messages} "
            "are allowed.",
            param="messages",
            code="too_long",
        )
    messages = [_message(message, index) for index, message in enumerate(body.messages)]
    max_prompt_tokens = state.engine.max_model_len - 1
    try:
        # In a thread: templates and long texts may take long, and other streams must go on.
        ids = await asyncio.to_thread(
            tokenizer.render_chat, messages, most_tokens=max_prompt_tokens
        )
    except PromptTooLongError as error:
        check_least_tokens(error.least_tokens, max_prompt_tokens, "messages")
        raise
    except ValueError as error:
        raise invalid(
            f"The model's chat template refuses these messages: {error}", param="messages"
        ) from error
    check_prompt_length(len(ids), max_prompt_tokens, "messages")
    return tuple(ids)


def _message(message: ChatMessage, index: int) -> dict[str, str]:
    """What templates get: role and text. `developer` is the newer name of `system`."""
    param = f"messages[{index}]"
    has_calls = bool(message.tool_calls) or message.function_call is not None
    if message.role in ("tool", "function") or has_calls:
        raise unsupported(param, f"'{param}': tool calling is not supported.")
    if message.audio is not None:
        raise unsupported(f"{param}.audio", f"'{param}.audio' is not supported.")
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _content(message.content, f"{param}.content")}


def _content(content: Any, param: str) -> str:
    """A string as it is; text parts joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(
            f"'{param}' must be a string or a list of text parts; found {json_type_name(content)}.",
            param=param,
            code="invalid_type",
        )
    return "\n".join(_part_text(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise unsupported(
            param, f"'{param}' must be a part of type \"text\": this model reads text."
        )
    extra = sorted(set(part) - {"type", "text"})
    if extra:
        raise invalid(f"Unknown field in '{param}'.", param=param, code="unknown_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"'{param}.text' must be a string.", param=param, code="invalid_type")
    return text


def _length_limits(body: ChatRequest) -> LengthLimits:
    if body.max_completion_tokens is None:
        return LengthLimits(requested=body.max_tokens, default=None, param="max_tokens")
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid(
            "'max_tokens' and 'max_completion_tokens' differ; send one of them.",
            param="max_tokens",
        )
    return LengthLimits(
        requested=body.max_completion_tokens, default=None, param="max_completion_tokens"
    )


def _num_top_logprobs(body: ChatRequest, state: ServerState) -> int:
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    check_logprobs(body.top_logprobs or 0, "top_logprobs", state.config)
    return body.top_logprobs or 0


class _ChatShape:
    """The response documents of one request."""

    def __init__(
        self,
        body: ChatRequest,
        state: ServerState,
        generation_id: str,
        prompt_tokens: int,
        top: int,
    ) -> None:
        self.body = body
        self.prompt_tokens = prompt_tokens
        self._tokenizer = state.engine.tokenizer
        self._num_top = top
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{generation_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": unix_time(),
            "model": body.model,
            "system_fingerprint": state.fingerprint,
        }

    def response(self, choices: list[Choice]) -> dict[str, Any]:
        return {
            **self._envelope,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(self.prompt_tokens, [choices]),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "choices": choices}

    def logprobs(self, events: list[TokenEvent]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        entries = [chat_logprob(self._tokenizer, event, self._num_top) for event in events]
        return {"content": [entry for entry in entries if entry is not None], "refusal": None}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self.logprobs(choice.events),
            "finish_reason": choice.finish_reason,
        }


class _ChatChunks:
    """Chunks: the role, then text as it comes, then the reason of the end, then usage."""

    def __init__(self, shape: _ChatShape) -> None:
        self._shape = shape
        options = shape.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._choices = [Choice() for _ in range(shape.body.n or 1)]

    def chunks(self, index: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
        choice = self._choices[index]
        if not choice.has_started:
            yield self._chunk(index, {"role": "assistant", "content": ""}, None, None)
        choice.count(event)
        logprobs = self._shape.logprobs([event])
        if event.text or (logprobs and logprobs["content"]):
            yield self._chunk(index, {"content": event.text}, logprobs, None)
        if event.finish_reason is not None:
            yield self._chunk(index, {}, None, event.finish_reason)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self._with_usage:
            totals = usage(self._shape.prompt_tokens, [self._choices])
            yield {**self._shape.chunk([]), "usage": totals}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = self._shape.chunk([choice])
        return {**chunk, "usage": None} if self._with_usage else chunk
