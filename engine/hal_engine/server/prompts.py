"""From what a request calls its prompt to token ids, within the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal_engine.api import Tokenizer
from hal_engine.server.errors import ApiError, invalid
from hal_engine.server.json_body import json_type_name

# Shorter texts are encoded at once; longer ones in a thread, so that other streams go on. From the
# same length on the tokenizer lets go of the interpreter's lock.
_THREAD_FROM_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its token ids, and its text where the client sent text."""

    token_ids: tuple[int, ...]
    text: str | None


async def encode_prompts(
    value: Any,
    tokenizer: Tokenizer,
    *,
    param: str,
    max_prompts: int,
    max_tokens: int,
    add_special_tokens: bool,
    parse_special: bool,
) -> list[Prompt]:
    """The prompts in `value`: a string, a list of strings, a list of ids, or a list of such lists.

    Raises ApiError 400 for anything else, for too many prompts, empty ones, ids outside the
    vocabulary, and prompts of more than `max_tokens` tokens.
    """
    prompts = []
    for name, item in _split(value, param, max_prompts):
        if isinstance(item, str):
            check_least_tokens(tokenizer.least_tokens(item), max_tokens, name)
            ids = await encode_text(
                tokenizer, item, add_special_tokens=add_special_tokens, parse_special=parse_special
            )
            prompts.append(Prompt(tuple(ids), item))
        else:
            check_prompt_length(len(item), max_tokens, name)
            _check_ids(item, tokenizer.vocab_size, name)
            prompts.append(Prompt(tuple(item), None))
        check_prompt_length(len(prompts[-1].token_ids), max_tokens, name)
    return prompts


async def encode_text(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, parse_special: bool
) -> list[int]:
    """Token ids of `text`, without holding up the event loop for a long one."""
    if len(text) < _THREAD_FROM_LENGTH:
        return tokenizer.encode(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )
    return await asyncio.to_thread(
        tokenizer.encode, text, add_special_tokens=add_special_tokens, parse_special=parse_special
    )


def check_prompt_length(num_tokens: int, max_tokens: int, param: str) -> None:
    """ApiError 400 for an empty prompt and for one that leaves no room for an answer."""
    if num_tokens == 0:
        raise invalid(f"'{param}' holds no tokens.", param=param)
    if num_tokens > max_tokens:
        raise context_length_exceeded(
            f"the prompt has {num_tokens} tokens, at most {max_tokens} leave room for an answer",
            param,
        )


def check_least_tokens(least_tokens: int, max_tokens: int, param: str) -> None:
    """ApiError 400 for a text that is too long whatever its tokens are: it is not tokenised."""
    if least_tokens > max_tokens:
        raise context_length_exceeded(
            f"the prompt has at least {least_tokens} tokens, at most {max_tokens} leave room for "
            "an answer",
            param,
        )


def context_length_exceeded(found: str, param: str) -> ApiError:
    """400 with the code that OpenAI's clients look for."""
    return invalid(
        f"The request does not fit the model's context: {found}.",
        param=param,
        code="context_length_exceeded",
    )


def _split(value: Any, param: str, max_prompts: int) -> list[tuple[str, Any]]:
    """(name for messages, string or list) of each prompt."""
    if isinstance(value, str):
        return [(param, value)]
    if not isinstance(value, list) or not value:
        found = "an empty array" if value == [] else json_type_name(value)
        raise invalid(
            f"'{param}' must be a string, a list of strings, a list of token ids or a list of "
            f"such lists, and not empty; found {found}.",
            param=param,
            code="invalid_type",
        )
    if isinstance(value[0], int):
        return [(param, value)]
    if len(value) > max_prompts:
        raise invalid(
            f"'{param}' holds {len(value)} prompts; at most {max_prompts} are allowed.",
            param=param,
            code="too_many_prompts",
        )
    kind = type(value[0])
    for index, item in enumerate(value):
        if kind not in (str, list) or type(item) is not kind:
            raise invalid(
                f"'{param}[{index}]' must be a string, or each item a list of token ids; "
                f"found {json_type_name(item)}.",
                param=f"{param}[{index}]",
                code="invalid_type",
            )
    return [(f"{param}[{index}]", item) for index, item in enumerate(value)]


def _check_ids(ids: Sequence[Any], vocab_size: int, param: str) -> None:
    for index, item in enumerate(ids):
        if type(item) is not int:  # bool is an int to isinstance
            raise invalid(
                f"'{param}[{index}]' must be a token id; found {json_type_name(item)}.",
                param=f"{param}[{index}]",
                code="invalid_type",
            )
        if not 0 <= item < vocab_size:
            raise invalid(
                f"'{param}[{index}]' is {item}; token ids are 0 to {vocab_size - 1}.",
                param=f"{param}[{index}]",
            )
