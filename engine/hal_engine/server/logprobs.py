"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hal_engine.api import TokenEvent, Tokenizer, TokenLogprob

_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for what JSON cannot say: minus infinity


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token as text, or as `bytes:\\xe2\\x82` where it is no complete UTF-8."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprob(tokenizer: Tokenizer, event: TokenEvent, num_top: int) -> dict[str, Any] | None:
    """One entry of `choices[].logprobs.content`; None for an event without a token."""
    if event.token_id is None or event.logprob is None:
        return None
    return {
        **_chat_entry(tokenizer, event.token_id, event.logprob),
        "top_logprobs": [
            _chat_entry(tokenizer, top.token_id, top.logprob)
            for top in event.top_logprobs[:num_top]
        ],
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


@dataclass(slots=True)
class CompletionLogprobs:
    """Builds `choices[].logprobs` of /v1/completions for one choice, chunk by chunk.

    `text_offset` counts characters of the choice's text (of prompt and answer with `echo`).
    """

    tokenizer: Tokenizer
    num_top: int
    _tokens: list[str] = field(default_factory=list)
    _token_logprobs: list[float | None] = field(default_factory=list)
    _top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    _text_offset: list[int] = field(default_factory=list)
    _num_characters: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add_prompt(self, token_ids: Sequence[int], event: TokenEvent) -> None:
        """The prompt's tokens, of a request with `echo`; the first has no logprob."""
        logprobs = event.prompt_logprobs or (None,) * len(token_ids)
        tops = event.prompt_top_logprobs or (None,) * len(token_ids)
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
            self._add(token_id, None if logprob is None else logprob.logprob, top)

    def add(self, event: TokenEvent) -> None:
        """The token of `event`, if it has one."""
        if event.token_id is not None:
            self._add(event.token_id, event.logprob, event.top_logprobs)

    def take(self) -> dict[str, Any] | None:
        """What was added since the last call; None if nothing was."""
        if not self._tokens:
            return None
        result = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs if self.num_top else None,
            "text_offset": self._text_offset,
        }
        self._tokens, self._token_logprobs = [], []
        self._top_logprobs, self._text_offset = [], []
        return result

    def _add(
        self, token_id: int, logprob: float | None, top: Sequence[TokenLogprob] | None
    ) -> None:
        self._tokens.append(token_text(self.tokenizer, token_id))
        self._token_logprobs.append(None if logprob is None else _finite(logprob))
        self._top_logprobs.append(self._top(token_id, logprob, top))
        self._text_offset.append(self._num_characters)
        self._num_characters += len(self._decoder.decode(self.tokenizer.token_bytes(token_id)))

    def _top(
        self, token_id: int, logprob: float | None, top: Sequence[TokenLogprob] | None
    ) -> dict[str, float] | None:
        """The best tokens and the drawn one, as OpenAI does; None where the engine gave none."""
        if logprob is None or top is None:
            return None
        result = {
            token_text(self.tokenizer, item.token_id): _finite(item.logprob)
            for item in top[: self.num_top]
        }
        result.setdefault(token_text(self.tokenizer, token_id), _finite(logprob))
        return result


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
