"""From a request's fields to `SamplingParams` and `GrammarSpec`, within the server's limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hal_engine.api import GrammarSpec, SamplingParams
from hal_engine.server.config import ServerConfig
from hal_engine.server.errors import ApiError, invalid
from hal_engine.server.json_body import json_type_name
from hal_engine.server.prompts import context_length_exceeded
from hal_engine.server.protocol import SamplingFields

# Below this temperature the softmax puts all its mass on the best token in float32; the quotient
# would overflow for values near zero.
_GREEDY_BELOW_TEMPERATURE = 1e-4
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """`requested`: the client's limit or None; `param`: the name it used."""

    requested: int | None
    default: int | None  # None: whatever the context leaves
    param: str
    allow_zero: bool = False


def sampling_params(
    request: SamplingFields,
    config: ServerConfig,
    *,
    vocab_size: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters of each sequence of `request`; ApiError 400 beyond a limit.

    `top_p` 0 keeps the single best token, and a temperature below 1e-4 is greedy.
    """
    temperature = _default(request.temperature, config.default_temperature)
    top_p = _default(request.top_p, config.default_top_p)
    top_k = max(request.top_k or 0, 0)
    if top_p == 0:
        top_k, top_p = 1, 1.0
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            f"'min_tokens' is {min_tokens}, more than the {max_tokens} tokens allowed.",
            param="min_tokens",
        )
    return SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW_TEMPERATURE else temperature,
        top_k=min(top_k, vocab_size),
        top_p=top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size, config),
        seed=None if request.seed is None else request.seed % 2**63,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_strings=_stop_strings(request.stop, config),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size, config),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def max_tokens_of(limits: LengthLimits, num_prompt_tokens: int, max_model_len: int) -> int:
    """How many tokens a sequence may get; ApiError 400 if prompt and answer do not fit."""
    room = max_model_len - num_prompt_tokens
    if limits.requested is None:
        return room if limits.default is None else min(limits.default, room)
    if limits.requested == 0 and not limits.allow_zero:
        raise invalid(f"'{limits.param}' must be at least 1.", param=limits.param)
    if limits.requested > room:
        raise context_length_exceeded(
            f"{num_prompt_tokens} prompt tokens and {limits.param} = {limits.requested} are more "
            f"than the context's {max_model_len} tokens",
            limits.param,
        )
    return limits.requested


def check_sequences(n: int, best_of: int, prompts: int, config: ServerConfig) -> None:
    """ApiError 400 when one request asks for too many sequences."""
    if n > config.max_n:
        raise invalid(f"'n' is {n}; at most {config.max_n} is allowed.", param="n")
    if best_of > config.max_best_of:
        raise invalid(
            f"'best_of' is {best_of}; at most {config.max_best_of} is allowed.", param="best_of"
        )
    if best_of < n:
        raise invalid(f"'best_of' is {best_of}, less than 'n', which is {n}.", param="best_of")
    if best_of * prompts > config.max_sequences:
        raise invalid(
            f"{prompts} prompts with {best_of} sequences each are {best_of * prompts} sequences; "
            f"at most {config.max_sequences} are allowed in one request.",
            param="n",
            code="too_many_sequences",
        )


def check_logprobs(count: int, param: str, config: ServerConfig) -> None:
    """ApiError 400 when more alternatives per token are asked for than allowed."""
    if count > config.max_logprobs:
        raise invalid(
            f"'{param}' is {count}; at most {config.max_logprobs} is allowed.", param=param
        )


def grammar_of(request: SamplingFields, config: ServerConfig) -> GrammarSpec | None:
    """The constraint on the output, if any; ApiError 400 for several or for oversized ones."""
    found: dict[str, GrammarSpec] = {}
    if request.response_format is not None and request.response_format.type != "text":
        found["response_format"] = _format_grammar(request, config)
    if request.guided_regex is not None:
        _check_length(
            len(request.guided_regex), config.max_regex_length, "guided_regex", "characters"
        )
        found["guided_regex"] = GrammarSpec(kind="regex", text=request.guided_regex)
    if request.guided_choice is not None:
        found["guided_choice"] = _choice_grammar(request.guided_choice, config)
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        raise invalid(f"{names} cannot be combined.", param=list(found)[1])
    return next(iter(found.values()), None)


def _format_grammar(request: SamplingFields, config: ServerConfig) -> GrammarSpec:
    wanted = request.response_format
    if wanted is None or wanted.type == "json_object":
        return GrammarSpec(kind="json_object", text="")
    param = "response_format.json_schema"
    if wanted.json_schema is None:
        raise invalid(
            f"The field '{param}' is required for this type.",
            param=param,
            code="missing_required_parameter",
        )
    text = json.dumps(wanted.json_schema.schema_, ensure_ascii=False)
    _check_length(len(text.encode("utf-8")), config.max_schema_bytes, f"{param}.schema", "bytes")
    return GrammarSpec(kind="json_schema", text=text)


def _choice_grammar(choices: list[str], config: ServerConfig) -> GrammarSpec:
    if not choices or not all(choices):
        raise invalid("'guided_choice' needs strings that are not empty.", param="guided_choice")
    _check_length(len(choices), config.max_choices, "guided_choice", "strings")
    text = json.dumps(choices, ensure_ascii=False)
    _check_length(len(text.encode("utf-8")), config.max_schema_bytes, "guided_choice", "bytes")
    return GrammarSpec(kind="choice", text=text)


def _logit_bias(
    biases: Mapping[str, float], vocab_size: int, config: ServerConfig
) -> dict[int, float]:
    _check_length(len(biases), config.max_logit_bias_entries, "logit_bias", "entries")
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise invalid(
                f"'logit_bias' has a key that is no token id from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        if not -100 <= bias <= 100:
            raise invalid("'logit_bias' values are from -100 to 100.", param="logit_bias")
        if int(key) in result:
            raise invalid(f"'logit_bias' names token {int(key)} twice.", param="logit_bias")
        result[int(key)] = bias
    return result


def _stop_strings(stop: Any, config: ServerConfig) -> tuple[str, ...]:
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list):
        raise _bad_stop(stop)
    _check_length(len(items), config.max_stop_strings, "stop", "strings")
    for item in items:
        if not isinstance(item, str):
            raise _bad_stop(item)
        if not item:
            raise invalid("'stop' must not hold an empty string.", param="stop")
        _check_length(len(item), config.max_stop_length, "stop", "characters")
    return tuple(items)


def _bad_stop(found: Any) -> ApiError:
    return invalid(
        f"'stop' must be a string or a list of strings; found {json_type_name(found)}.",
        param="stop",
        code="invalid_type",
    )


def _stop_token_ids(ids: list[int], vocab_size: int, config: ServerConfig) -> frozenset[int]:
    _check_length(len(ids), config.max_stop_token_ids, "stop_token_ids", "ids")
    if any(not 0 <= item < vocab_size for item in ids):
        raise invalid(
            f"'stop_token_ids' must be from 0 to {vocab_size - 1}.", param="stop_token_ids"
        )
    return frozenset(ids)


def _check_length(found: int, allowed: int, param: str, unit: str) -> None:
    if found > allowed:
        raise invalid(
            f"'{param}' has {found} {unit}; at most {allowed} are allowed.",
            param=param,
            code="too_long",
        )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
