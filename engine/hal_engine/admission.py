"""Which requests the engine takes: numbers in range, ids in the vocabulary, a length that fits.

The server checks types and gives OpenAI-shaped errors; this is the engine's own door, for every
caller. A request refused here could never have run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hal_engine.api import GenerationRequest, RequestRefusedError, SamplingParams


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raises RequestRefusedError, naming the field, what it may be and what it is."""
    params = request.sampling
    check_token_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    # A prompt may fill the context only if nothing is to be generated.
    most = max_model_len if params.max_tokens == 0 else max_model_len - 1
    if len(request.prompt_token_ids) > most:
        raise RequestRefusedError(
            f"prompt_token_ids: at most {most} tokens leave room in the model's context of "
            f"{max_model_len}, found {len(request.prompt_token_ids)}; shorten the prompt"
        )
    _check_numbers(params, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias.keys(), vocab_size)
    if not all(math.isfinite(value) for value in params.logit_bias.values()):
        raise RequestRefusedError("logit_bias: every value must be finite")
    if not all(params.stop_strings):
        raise RequestRefusedError("stop_strings: an empty string would stop at once")
    if request.deadline_s is not None:
        _check_range("deadline_s", request.deadline_s, 0, math.inf)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestRefusedError unless there is at least one id and all are in the vocabulary."""
    if not token_ids:
        raise RequestRefusedError(f"{name}: at least one token is required, found none")
    _check_ids(name, token_ids, vocab_size)


def _check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestRefusedError(
            f"{name}: token ids must be in 0..{vocab_size - 1}, found {wrong}"
        )


def _check_numbers(params: SamplingParams, vocab_size: int) -> None:
    infinity = math.inf
    _check_range("temperature", params.temperature, 0, 1e6)
    _check_range("top_k", params.top_k, 0, infinity)
    _check_range("top_p", params.top_p, 0, 1)
    if params.top_p == 0:
        raise RequestRefusedError("top_p: must be above 0; use temperature 0 for greedy decoding")
    _check_range("min_p", params.min_p, 0, 1)
    _check_range("presence_penalty", params.presence_penalty, -1e6, 1e6)
    _check_range("frequency_penalty", params.frequency_penalty, -1e6, 1e6)
    _check_range("repetition_penalty", params.repetition_penalty, 1e-6, 1e6)
    _check_range("max_tokens", params.max_tokens, 0, infinity)
    _check_range("min_tokens", params.min_tokens, 0, params.max_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _check_range(name, value, 0, vocab_size)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise RequestRefusedError(f"{name}: must be between {low:g} and {high:g}, found {value!r}")
