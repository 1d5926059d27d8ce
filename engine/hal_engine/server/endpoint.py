"""Steps that all generating endpoints take: read, check, generate, collect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.api import GenerationRequest, GrammarSpec, SamplingParams, TokenEvent
from hal_engine.server.errors import encode_json
from hal_engine.server.generation import Generation, until_disconnect
from hal_engine.server.json_body import parse_json_object
from hal_engine.server.protocol import (
    RequestT,
    SamplingFields,
    refuse_unsupported,
    validate_request,
)
from hal_engine.server.state import ServerState, check_model, state_of

_THREAD_FROM_BYTES = 65_536


@dataclass(slots=True)
class Choice:
    """Everything one sequence produced."""

    text: list[str] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str = "stop"
    has_started: bool = False

    def add(self, event: TokenEvent) -> None:
        """Takes the next event of the sequence."""
        self.text.append(event.text)
        self.events.append(event)
        self.count(event)

    def count(self, event: TokenEvent) -> None:
        """Takes the numbers of the next event only, for streams: its text is on its way."""
        self.has_started = True
        self.num_generated_tokens = max(self.num_generated_tokens, event.num_generated_tokens)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason

    def mean_logprob(self) -> float:
        """Log-probability per token, by which `best_of` chooses."""
        logprobs = [event.logprob for event in self.events if event.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


async def read_request(request: Request, model: type[RequestT]) -> RequestT:
    """The body as `model`; ApiError for anything that is not one."""
    state = state_of(request)
    content = await request.body()
    depth = state.config.max_json_depth
    if len(content) < _THREAD_FROM_BYTES:
        body = _parse(content, model, depth)
    else:  # in a thread, so that streams go on meanwhile
        body = await asyncio.to_thread(_parse, content, model, depth)
    if isinstance(body, SamplingFields):
        refuse_unsupported(body)
        check_model(body.model, state)
    return body


def generation_id_of(request: Request) -> str:
    """The server's own id of the request, in the ids of the answer and of the engine's requests."""
    return str(request.state.generation_id)


def arrived_s(request: Request) -> float:
    """The event loop's time at which the request's head was read."""
    return float(request.state.arrived_s)


def engine_requests(
    generation_id: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sequence[SamplingParams],
    grammar: GrammarSpec | None,
    *,
    copies: int,
    deadline_s: float,
) -> list[GenerationRequest]:
    """`copies` sequences of each prompt; with a seed, copy i draws with seed + i."""
    result: list[GenerationRequest] = []
    for prompt, params in zip(prompts, sampling, strict=True):
        for copy in range(copies):
            result.append(
                GenerationRequest(
                    request_id=f"{generation_id}-{len(result)}",
                    prompt_token_ids=prompt,
                    sampling=_reseeded(params, copy),
                    grammar=grammar,
                    deadline_s=deadline_s,
                )
            )
    return result


async def collect(request: Request, generation: Generation, count: int) -> list[Choice]:
    """Runs `generation` to its end; it is stopped when the client goes (ClientDisconnected)."""
    async with generation:
        return await until_disconnect(request.receive, _collect(generation, count))


def remaining_deadline_s(request: Request, state: ServerState) -> float:
    """Seconds that are left of the request's deadline, at least a millisecond."""
    spent = asyncio.get_running_loop().time() - arrived_s(request)
    return max(state.config.request_deadline_s - spent, 0.001)


def unix_time() -> int:
    """Seconds since 1970, for `created`."""
    return int(time.time())


def json_response(document: dict[str, Any]) -> Response:
    """200 with `document` as JSON."""
    return Response(encode_json(document), media_type="application/json")


def usage(prompt_tokens: int, choices_per_prompt: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """OpenAI's `usage`: a prompt counts once, however many sequences continue it."""
    completion = sum(c.num_generated_tokens for group in choices_per_prompt for c in group)
    cached = sum(group[0].num_cached_tokens for group in choices_per_prompt)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _parse(content: bytes, model: type[RequestT], max_depth: int) -> RequestT:
    return validate_request(model, parse_json_object(content, max_depth=max_depth))


async def _collect(generation: Generation, count: int) -> list[Choice]:
    choices = [Choice() for _ in range(count)]
    while batch := await generation.next_batch():
        for index, event in batch:
            choices[index].add(event)
    return choices


def _reseeded(params: SamplingParams, copy: int) -> SamplingParams:
    if params.seed is None or copy == 0:
        return params
    return replace(params, seed=(params.seed + copy) % 2**63)
