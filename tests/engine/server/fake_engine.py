"""A deterministic engine for tests of the server: one byte, one token; failures on command.

A prompt that holds one of the words below makes its request fail in that way:
`!queue` QueueFullError, `!refuse` RequestRefusedError, `!dead` EngineDeadError, `!crash` an
unexpected exception, `!endless` no token ever, `!slow` 20 ms a token, `!mid_error` an error event,
`!mid_crash` an exception, `!mid_dead` EngineDeadError, and `!mid_dying` the error event of an
engine that is dead from then on, each after three tokens. `!mid_request` and `!mid_deadline` are
error events of those faults.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from hal_engine.api import (
    EngineDeadError,
    EngineStats,
    Failure,
    GenerationRequest,
    OpCallCount,
    QueueFullError,
    RequestRefusedError,
    TokenEvent,
    TokenLogprob,
)
from hal_engine.tokenizer_errors import PromptTooLongError

ANSWER = "Déjà vu: the quick brown fox jumps over the lazy dog. "
BOS, EOS, VOCAB_SIZE = 256, 257, 300
SECRET_DETAIL = "/internal/path/of/the/engine"


class FakeTokenizer:
    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({BOS, EOS})
    has_chat_template = True

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode("utf-8"))

    def least_tokens(self, text: str) -> int:
        return len(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.token_bytes(i) for i in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        if "!template" in text:
            raise ValueError("roles must alternate")
        if most_tokens is not None and self.least_tokens(text) > most_tokens:
            raise PromptTooLongError(self.least_tokens(text), most_tokens)
        return [BOS, *text.encode("utf-8")]

    def close(self) -> None:
        """Nothing runs outside."""


class FakeEngine:
    model_id = "fake/model"

    def __init__(self, *, max_model_len: int = 2000, embeddings: bool = True) -> None:
        self.tokenizer = FakeTokenizer()
        self.max_model_len = max_model_len
        self.supports_embeddings = embeddings
        self.degraded: list[str] = []
        self.ready_error: Exception | None = None
        self.ready_delay_s = 0.0
        self.ready_checks = 0
        self.stats_error: Exception | None = None
        self.max_live = 10_000
        self.requests: list[GenerationRequest] = []
        self.live: set[str] = set()
        self.cancelled: list[str] = []
        self.tokens_sent = 0
        self.is_closed = False
        self.audit: str | None = None
        self.embeds_live = 0
        self.embeds_cancelled = 0

    def audit_report(self) -> str | None:
        return self.audit

    def plan_json(self) -> dict[str, Any]:
        return {"schema": 1, "hash": self.plan_hash(), "ops": []}

    def plan_hash(self) -> str:
        return "0123456789abcdef0123456789abcdef"

    def degraded_reasons(self) -> Sequence[str]:
        return self.degraded

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        prompt = bytes(i for i in request.prompt_token_ids if i < 256)
        self.requests.append(request)
        if b"!queue" in prompt or len(self.live) >= self.max_live:
            raise QueueFullError(7, 7, 2.3)
        if b"!refuse" in prompt:
            raise RequestRefusedError("the grammar does not compile: unbalanced bracket")
        if b"!dead" in prompt:
            raise EngineDeadError(f"worker 1 ended: {SECRET_DETAIL}")
        if b"!crash" in prompt:
            raise RuntimeError(SECRET_DETAIL)
        self.live.add(request.request_id)
        finished = False
        try:
            async for event in self._events(request, prompt):
                finished = event.finish_reason is not None
                yield event
        finally:
            self.live.discard(request.request_id)
            if not finished:
                self.cancelled.append(request.request_id)

    async def _events(self, request: GenerationRequest, prompt: bytes) -> AsyncIterator[TokenEvent]:
        sampling = request.sampling
        if b"!endless" in prompt:
            await asyncio.Event().wait()
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = ""
        answer = ANSWER.encode("utf-8")
        for number in range(1, sampling.max_tokens + 1):
            await asyncio.sleep(0.02 if b"!slow" in prompt else 0)
            if number == 4:
                if failure := self._failure(prompt):
                    yield self._end(request, failure)
                    return
                if b"!mid_crash" in prompt:
                    raise RuntimeError(SECRET_DETAIL)
                if b"!mid_dead" in prompt:
                    raise EngineDeadError(SECRET_DETAIL)
            token = answer[((sampling.seed or 0) + number - 1) % len(answer)]
            if token == 0xA9 and sampling.seed:
                token = ord("e")  # a seed may start within a character
            piece = decoder.decode(bytes([token])) if not sampling.seed else chr(token % 128)
            text += piece
            stop = next((s for s in sampling.stop_strings if s in text), None)
            reason = "stop" if stop else "length" if number == sampling.max_tokens else None
            self.tokens_sent += 1
            yield TokenEvent(
                request_id=request.request_id,
                token_id=token,
                text="" if stop else piece,
                logprob=None if sampling.logprobs is None else self._logprob(token),
                top_logprobs=self._top(token, sampling.logprobs or 0),
                prompt_logprobs=self._prompt(request) if number == 1 else None,
                finish_reason=reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=1,
                num_generated_tokens=number,
            )
            if reason:
                return

    def _failure(self, prompt: bytes) -> Failure | None:
        if b"!mid_error" in prompt:
            return Failure("server", "The logits were not finite.")
        if b"!mid_request" in prompt:
            return Failure("request", "The grammar met its limits.")
        if b"!mid_deadline" in prompt:
            return Failure("deadline", "The deadline has passed.")
        if b"!mid_dying" in prompt:
            self.ready_error = EngineDeadError(SECRET_DETAIL)
            return Failure("engine", f"engine: ended by {SECRET_DETAIL}")
        return None

    def _end(self, request: GenerationRequest, failure: Failure) -> TokenEvent:
        return TokenEvent(
            request_id=request.request_id,
            token_id=None,
            text="",
            finish_reason="error",
            error=failure.message,
            fault=failure.fault,
        )

    def _logprob(self, token: int) -> float:
        return float("-inf") if token == ord("q") else -0.25 - token % 7

    def _top(self, token: int, count: int) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(200 + i, -0.125 - i) for i in range(count))

    def _prompt(self, request: GenerationRequest) -> tuple[TokenLogprob | None, ...] | None:
        if request.sampling.prompt_logprobs is None:
            return None
        ids = request.prompt_token_ids
        return (None, *(TokenLogprob(i, self._logprob(i)) for i in ids[1:]))

    async def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        self.embeds_live += 1
        try:
            if any(b"!endless" in bytes(i for i in ids if i < 256) for ids in token_ids):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.embeds_cancelled += 1
            raise
        finally:
            self.embeds_live -= 1
        return [[float(len(ids)), 0.5, -1.25] for ids in token_ids]

    async def check_ready(self, deadline_s: float) -> None:
        self.ready_checks += 1
        if self.ready_error is not None:
            raise self.ready_error
        async with asyncio.timeout(deadline_s):
            await asyncio.sleep(self.ready_delay_s)

    def stats(self) -> EngineStats:
        if self.stats_error is not None:
            raise self.stats_error
        return EngineStats(
            running=len(self.live),
            waiting=3,
            kv_blocks_total=100,
            kv_blocks_used=len(self.live),
            prompt_tokens=sum(len(r.prompt_token_ids) for r in self.requests),
            cached_prompt_tokens=11,
            generated_tokens=self.tokens_sent,
            preemptions=2,
            steps=self.tokens_sent,
            replayed_steps=self.tokens_sent // 2,
        )

    def op_calls(self) -> Sequence[OpCallCount]:
        row = {"op": "gemm", "phase": "decode", "tier": "native", "token_range": "1-16"}
        return [
            OpCallCount(site=f"layers.{i}.mlp", implementation="cpu.onednn", calls=5, **row)
            for i in range(4)
        ]

    async def drain(self) -> None:
        while self.live:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.is_closed = True
