"""What passes between the server, the engine loop and the scheduler: requests in, token events out.

Everything here is plain data: no torch, no HTTP. The server builds a `GenerationRequest`; the
engine answers with a stream of `TokenEvent`; the last event of a stream has a `finish_reason`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length", "cancelled", "error"]
# Whose doing it is that a request ended with an error: its own (it would end so again), its
# deadline's, the server's (broken numbers, a broken library), or that of an engine which has ended.
Fault = Literal["request", "deadline", "server", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Defaults are greedy decoding without limits on the vocabulary.

    Penalties follow OpenAI's definition (presence, frequency: over generated tokens) and the
    repetition penalty of CTRL (https://arxiv.org/abs/1909.05858: over prompt and generated tokens).
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # with a seed the stream of draws depends on nothing but the seed
    max_tokens: int = 16
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of top alternatives per generated token; None is off
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A constraint on the output, compiled by the structured-output library."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    text: str  # the schema, the expression, the grammar; a JSON list of strings for `choice`


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate. `request_id` is unique among the live requests of the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    deadline_s: float | None = None  # seconds from arrival until the request is ended with an error


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended with an error; `message` is for people."""

    fault: Fault
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One generated token (or the end) of one request.

    `text` is the text that became certain with this token: detokenisation holds back incomplete
    UTF-8 and any tail that could still become a stop string. `token_id` is None on an end that
    produced no token.
    """

    request_id: str
    token_id: int | None
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    # Of each prompt token given those before it, None for the first; on the first event only.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None  # beside it
    finish_reason: FinishReason | None = None
    error: str | None = None  # for people; set when finish_reason is "error"
    fault: Fault | None = None  # set with `error`
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    num_generated_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for /metrics and /health; all counts since start unless named otherwise."""

    running: int  # now
    waiting: int  # now
    kv_blocks_total: int
    kv_blocks_used: int  # now, without blocks that only the prefix cache keeps
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    replayed_steps: int  # of them, those that ran as one call


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCallCount:
    """Calls of one bound op: a row of `hal_op_calls_total`."""

    site: str
    op: str
    phase: str
    implementation: str
    tier: str
    token_range: str  # e.g. "1-16"
    calls: int


class QueueFullError(Exception):
    """A queue is at its bound; the caller answers 429/503 with `retry_after_s`."""

    def __init__(
        self, waiting: int, bound: int, retry_after_s: float, *, what: str = "requests"
    ) -> None:
        """what: the things that wait, in the plural."""
        super().__init__(
            f"engine: at most {bound} {what} may wait, {waiting} are waiting; "
            f"retry in {retry_after_s:.0f} s"
        )
        self.waiting = waiting
        self.bound = bound
        self.retry_after_s = retry_after_s
        self.what = what


class EngineDeadError(Exception):
    """The engine loop or a worker has ended; every later call raises this with the cause."""


class RequestRefusedError(ValueError):
    """A request the engine can never serve (longer than the model's context, bad grammar, …)."""


class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens (EOS, chat markers, …): never part of the generated text."""
        ...

    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool) -> list[int]: ...
    def least_tokens(self, text: str) -> int:
        """No tokenisation of `text` is shorter; told in no time, and 0 where nothing is known."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; for a special token, those of its literal name."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat; user content never becomes special tokens.

        Raises PromptTooLongError, before anything is tokenised, for a chat that surely has more
        than `most_tokens`; one that comes back may have more all the same.
        """
        ...

    def close(self) -> None:
        """Ends what runs outside of this process; a later `render_chat` may start it anew."""
        ...


class AsyncEngine(Protocol):
    """The engine as the server sees it. All methods are called from the server's event loop."""

    @property
    def model_id(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def supports_embeddings(self) -> bool: ...
    def plan_json(self) -> dict[str, Any]: ...
    def plan_hash(self) -> str: ...
    def degraded_reasons(self) -> Sequence[str]:
        """Why the engine is not at its best: one line per waiver in use. Empty when it is."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        """Stream of events, ending with one that has a finish_reason.

        Closing the iterator (or cancelling its task) cancels the request: its KV blocks are freed
        before the next step. Raises QueueFullError, RequestRefusedError, EngineDeadError.
        """
        ...

    async def embed(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]: ...
    async def check_ready(self, deadline_s: float) -> None:
        """Runs a dummy forward; raises EngineDeadError or TimeoutError."""
        ...

    def stats(self) -> EngineStats:
        """Raises EngineDeadError."""
        ...

    def op_calls(self) -> Sequence[OpCallCount]: ...
    def audit_report(self) -> str | None:
        """The audit so far as JSON ("halstack.audit/1"), None where it is off. From any thread;
        takes a moment."""
        ...

    async def drain(self) -> None:
        """Returns when no request is running or waiting."""
        ...

    async def close(self) -> None: ...
