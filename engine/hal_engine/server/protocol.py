"""The request bodies, strictly typed: OpenAI's fields, documented extensions, and nothing else.

Extensions beyond OpenAI's API: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`,
`stop_token_ids`, `guided_regex`, `guided_choice`; on /v1/completions also `add_special_tokens`,
`parse_special` and `response_format`.

Accepted without effect: `user`, `metadata`, `safety_identifier`, `prompt_cache_key`,
`prompt_cache_retention`, `prompt_cache_options`, `parallel_tool_calls`, `store` (false only),
`service_tier` ("auto" or "default"), `modalities` (["text"] only).

Refused by name when set: `tools`, `functions` and what belongs to them, `audio`, `prediction`,
`reasoning_effort`, `verbosity`, `web_search_options`, `moderation`, `suffix`, `dimensions`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from hal.suggestions import nearest_name
from hal_engine.server.errors import ApiError, invalid, unsupported
from hal_engine.server.json_body import json_type_name

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1

ItemT = TypeVar("ItemT")


def _first_wrong_entry(*kinds: type) -> BeforeValidator:
    """For objects of values of `kinds`: of those with another value, the first one only is kept."""

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            for key, item in value.items():
                if type(item) not in kinds:
                    return {key: item}
        return value

    return BeforeValidator(shorten)


# pydantic makes an error of about a kilobyte of each wrong item. A body of the largest size holds
# a million of them, and only the first is told: so no list, object or model collects more.
FailFastList = Annotated[list[ItemT], Field(fail_fast=True)]
NumberByKey = Annotated[dict[str, float], _first_wrong_entry(int, float)]
TextByKey = Annotated[dict[str, str], _first_wrong_entry(str)]
ShortText = Annotated[str, Field(max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StrictModel(BaseModel):
    """No coercion (true is no integer, "2" no number), no NaN, no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_first_unknown(cls: type[BaseModel], document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        known = {field.alias or name for name, field in cls.model_fields.items()}
        surplus = set([key for key in document if key not in known][1:])
        return {key: value for key, value in document.items() if key not in surplus}


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: chunks are never padded


class JsonSchemaFormat(StrictModel):
    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: ShortText | None = None
    strict: bool | None = None  # without effect: a schema is always enforced


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingFields(StrictModel):
    """What both generation endpoints share. Limits that depend on the settings come later."""

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    stop: Any = None  # a string or a list of strings, see parameters.py
    logit_bias: NumberByKey | None = None
    response_format: ResponseFormat | None = None
    # Extensions
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)  # 0 and −1 are off
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    ignore_eos: bool | None = None
    stop_token_ids: FailFastList[int] | None = None
    guided_regex: str | None = None
    guided_choice: FailFastList[str] | None = None
    # Accepted without effect
    user: ShortText | None = None
    metadata: TextByKey | None = None
    store: bool | None = None
    service_tier: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatMessage(StrictModel):
    """One message. The null fields are those of an assistant's message sent back as received."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = None  # a string or a list of text parts, see chat.py
    name: ShortText | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: ShortText | None = None


class ChatRequest(SamplingFields):
    messages: FailFastList[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=INT32_MAX)
    parallel_tool_calls: bool | None = None
    modalities: FailFastList[str] | None = None
    # Refused when set
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionRequest(SamplingFields):
    prompt: Any  # a string, a list of strings, token ids or a list of those; see prompts.py
    best_of: int | None = Field(None, ge=1, le=INT32_MAX)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=INT32_MAX)
    suffix: Any = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class EmbeddingRequest(StrictModel):
    model: str = Field(min_length=1, max_length=512)
    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)
    user: ShortText | None = None


RequestT = TypeVar("RequestT", bound=StrictModel)


def validate_request(model: type[RequestT], document: dict[str, Any]) -> RequestT:
    """`document` as `model`; ApiError 400 that names the field otherwise."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise _from_validation(model, details) from error


def refuse_unsupported(request: SamplingFields) -> None:
    """ApiError 400 for a field of OpenAI's API that is set and not served."""
    if request.store:
        raise unsupported("store", "'store' must be false: this server keeps no completions.")
    if request.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", '\'service_tier\' must be "auto" or "default".')
    if isinstance(request, CompletionRequest) and request.suffix not in (None, ""):
        raise unsupported("suffix", "'suffix' is not supported: this model does not insert text.")
    if isinstance(request, ChatRequest):
        _refuse_unsupported_chat(request)


def _refuse_unsupported_chat(request: ChatRequest) -> None:
    if request.tools or request.functions:
        raise unsupported(
            "tools" if request.tools else "functions",
            "Tool calling is not supported: send the request without 'tools' and 'functions', or "
            "constrain the output with 'response_format'.",
        )
    for name in ("tool_choice", "function_call"):
        if getattr(request, name) not in (None, "none", "auto"):
            raise unsupported(name, f"'{name}' needs tools, which are not supported.")
    if request.reasoning_effort not in (None, "none"):
        raise unsupported("reasoning_effort", "'reasoning_effort' is not supported.")
    for name in ("audio", "prediction", "verbosity", "web_search_options", "moderation"):
        if getattr(request, name) is not None:
            raise unsupported(name, f"'{name}' is not supported.")
    if request.modalities not in (None, ["text"]):
        raise unsupported("modalities", "'modalities' must be [\"text\"].")


def _from_validation(model: type[StrictModel], details: list[ErrorDetails]) -> ApiError:
    """The first problem, an unknown field before others: it is the likeliest cause of the rest."""
    first = next((item for item in details if item["type"] == "extra_forbidden"), details[0])
    location = first["loc"]
    param = _dotted(location)
    if first["type"] == "extra_forbidden":
        shown = _shown(str(location[-1]))
        near = nearest_name(shown, _known_names(model, location))
        hint = f" Did you mean '{near}'?" if near else ""
        return invalid(
            f"Unknown field '{shown}'.{hint}", param=_shown(param), code="unknown_parameter"
        )
    if first["type"] == "missing":
        return invalid(
            f"The field '{param}' is required.", param=param, code="missing_required_parameter"
        )
    found = json_type_name(first["input"])
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return invalid(
        f"Invalid '{_shown(param)}': {first['msg']}; found {found}.", param=_shown(param), code=code
    )


def _known_names(model: type[StrictModel], location: tuple[int | str, ...]) -> list[str]:
    """Field names of the (nested) model that `location` points into."""
    nested: dict[str, type[StrictModel]] = {
        "messages": ChatMessage,
        "stream_options": StreamOptions,
        "response_format": ResponseFormat,
        "json_schema": JsonSchemaFormat,
    }
    parents = [part for part in location[:-1] if part in nested]
    owner = nested[str(parents[-1])] if parents else model
    return [field.alias or name for name, field in owner.model_fields.items()]


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"
