"""/v1/completions: https://platform.openai.com/docs/api-reference/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hal_engine.api import SamplingParams, TokenEvent
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
from hal_engine.server.errors import invalid
from hal_engine.server.generation import Generation
from hal_engine.server.logprobs import CompletionLogprobs
from hal_engine.server.parameters import (
    LengthLimits,
    check_logprobs,
    check_sequences,
    grammar_of,
    max_tokens_of,
    sampling_params,
)
from hal_engine.server.prompts import Prompt, encode_prompts
from hal_engine.server.protocol import CompletionRequest
from hal_engine.server.state import ServerState, state_of
from hal_engine.server.streaming import stream_response

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default


async def completions(request: Request) -> Response:
    """Text, streamed or not. Raises ApiError, the engine's errors and ClientDisconnected."""
    state = state_of(request)
    body = await read_request(request, CompletionRequest)
    n, best_of = body.n or 1, body.best_of or body.n or 1
    check_logprobs(body.logprobs or 0, "logprobs", state.config)
    if best_of > n and body.stream:
        raise invalid("'best_of' above 'n' cannot be streamed.", param="best_of")
    grammar = grammar_of(body, state.config)
    prompts = await encode_prompts(
        body.prompt,
        state.engine.tokenizer,
        param="prompt",
        max_prompts=state.config.max_prompts,
        max_tokens=state.engine.max_model_len - 1,
        add_special_tokens=body.add_special_tokens is not False,
        parse_special=body.parse_special is not False,
    )
    check_sequences(n, best_of, len(prompts), state.config)
    requests = engine_requests(
        generation_id_of(request),
        [prompt.token_ids for prompt in prompts],
        [_sampling(body, state, prompt, chooses=best_of > n) for prompt in prompts],
        grammar,
        copies=best_of,
        deadline_s=remaining_deadline_s(request, state),
    )
    generation = Generation(state, requests, request.state.arrived_s)
    shape = _CompletionShape(body, state, generation_id_of(request), prompts)
    if body.stream:
        return await stream_response(request, generation, _CompletionChunks(shape, n))
    choices = await collect(request, generation, len(requests))
    groups = [choices[start : start + best_of] for start in range(0, len(choices), best_of)]
    return json_response(shape.response(groups, n))


def _sampling(
    body: CompletionRequest, state: ServerState, prompt: Prompt, *, chooses: bool
) -> SamplingParams:
    """Parameters for one prompt. Echo without an answer still takes one step, for the prompt."""
    limits = LengthLimits(
        requested=body.max_tokens,
        default=_DEFAULT_MAX_TOKENS,
        param="max_tokens",
        allow_zero=bool(body.echo),
    )
    max_tokens = max_tokens_of(limits, len(prompt.token_ids), state.engine.max_model_len)
    logprobs = 0 if body.logprobs is None and chooses else body.logprobs
    return sampling_params(
        body,
        state.config,
        vocab_size=state.engine.tokenizer.vocab_size,
        max_tokens=max(max_tokens, 1),
        logprobs=logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


class _CompletionShape:
    """The response documents of one request."""

    def __init__(
        self, body: CompletionRequest, state: ServerState, generation_id: str, prompts: list[Prompt]
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        # With max_tokens 0 the engine's one token is none of the client's.
        self.is_echo_only = bool(body.echo) and body.max_tokens == 0
        self._tokenizer = state.engine.tokenizer
        self.envelope: dict[str, Any] = {
            "id": f"cmpl-{generation_id}",
            "object": "text_completion",
            "created": unix_time(),
            "model": body.model,
            "system_fingerprint": state.fingerprint,
        }

    def response(self, groups: list[list[Choice]], n: int) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt, group in zip(self.prompts, groups, strict=True):
            for choice in _best(group, n):
                choices.append(self._choice(len(choices), prompt, choice))
        return {**self.envelope, "choices": choices, "usage": self.usage(groups)}

    def usage(self, groups: list[list[Choice]]) -> dict[str, Any]:
        if self.is_echo_only:
            for group in groups:
                for choice in group:
                    choice.num_generated_tokens = 0
        return usage(self.prompt_tokens, groups)

    def new_logprobs(self) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        return CompletionLogprobs(self._tokenizer, self.body.logprobs)

    def prompt_text(self, prompt: Prompt) -> str:
        """The prompt as sent; ids are decoded with their special tokens."""
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _choice(self, index: int, prompt: Prompt, choice: Choice) -> dict[str, Any]:
        logprobs = self.new_logprobs()
        if logprobs is not None:
            if self.body.echo:
                logprobs.add_prompt(prompt.token_ids, choice.events[0])
            for event in [] if self.is_echo_only else choice.events:
                logprobs.add(event)
        text = "" if self.is_echo_only else "".join(choice.text)
        return {
            "index": index,
            "text": (self.prompt_text(prompt) if self.body.echo else "") + text,
            "logprobs": None if logprobs is None else logprobs.take(),
            "finish_reason": "length" if self.is_echo_only else choice.finish_reason,
        }


class _CompletionChunks:
    """Chunks of the same shape as the response; the prompt first with `echo`."""

    def __init__(self, shape: _CompletionShape, n: int) -> None:
        self._shape = shape
        self._n = n
        options = shape.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        count = n * len(shape.prompts)
        self._choices = [Choice() for _ in range(count)]
        self._logprobs = [shape.new_logprobs() for _ in range(count)]

    def chunks(self, index: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
        choice, logprobs = self._choices[index], self._logprobs[index]
        text = "" if self._shape.is_echo_only else event.text
        if not choice.has_started and self._shape.body.echo:
            prompt = self._shape.prompts[index // self._n]
            text = self._shape.prompt_text(prompt) + text
            if logprobs is not None:
                logprobs.add_prompt(prompt.token_ids, event)
        choice.count(event)
        if logprobs is not None and not self._shape.is_echo_only:
            logprobs.add(event)
        taken = None if logprobs is None else logprobs.take()
        finish_reason = event.finish_reason
        if finish_reason is not None and self._shape.is_echo_only:
            finish_reason = "length"
        if text or taken or finish_reason is not None:
            yield self._chunk(
                [
                    {
                        "index": index,
                        "text": text,
                        "logprobs": taken,
                        "finish_reason": finish_reason,
                    }
                ]
            )

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self._with_usage:
            groups = [
                self._choices[start : start + self._n]
                for start in range(0, len(self._choices), self._n)
            ]
            yield {**self._chunk([]), "usage": self._shape.usage(groups)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._shape.envelope, "choices": choices}
        return {**chunk, "usage": None} if self._with_usage else chunk


def _best(group: list[Choice], n: int) -> list[Choice]:
    """The n of highest log-probability per token; all, in their order, where n is all."""
    if len(group) == n:
        return group
    return sorted(group, key=Choice.mean_logprob, reverse=True)[:n]
