"""The rehearsal of a model: which inputs it is run with, and what comes out, to be compared.

Two prompts of a few random tokens, one step that decodes after them, and two prompts of which one
is padded at its beginning; an image of the model's own size for a vision model. A model that takes
something else is given `example_inputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hal.errors import RoutingError

Inputs = Mapping[str, Any]

_PROMPT, _BATCH, _PADDING = 12, 2, 3
_CACHES = ("cache", "past_key_values")
# Largest difference between routed and unrouted, as a share of the largest value, by dtype.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 6e-2, "float16": 2e-2}


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of the rehearsal. tokens: of its input, over the batch. seen: [B, T], where the
    results count (not at padding). continues: with the cache that the step before it returned."""

    inputs: Inputs
    tokens: int
    seen: torch.Tensor | None = None
    continues: bool = False


def rehearsal_steps(model: Any, examples: Sequence[Inputs] | None) -> list[Step]:
    """The forwards of a rehearsal. Raises RoutingError if nobody can say what the model takes."""
    if examples is not None:
        return [Step(inputs=dict(example), tokens=_tokens_of(example)) for example in examples]
    main = getattr(model, "main_input_name", "")
    if main == "input_ids":
        return _text_steps(model)
    if main == "pixel_values":
        return [_image_step(model)]
    raise RoutingError(
        f"routing of {type(model).__name__}",
        "a model that takes input_ids or pixel_values",
        main or "a model that does not say",
        "pass example_inputs: a list of what its forward takes, by name",
    )


def _tokens_of(example: Inputs) -> int:
    ids = example.get("input_ids", example.get("inputs_embeds"))
    if isinstance(ids, torch.Tensor):
        return ids.shape[0] * ids.shape[1]
    return max((v.shape[0] for v in example.values() if isinstance(v, torch.Tensor)), default=1)


def _text_steps(model: Any) -> list[Step]:
    ids = _random_ids(model, _PROMPT + 1)
    ones = torch.ones_like(ids)
    prompt = {"input_ids": ids[:, :_PROMPT], "attention_mask": ones[:, :_PROMPT]}
    mask = ones[:, : _PROMPT - 1].clone()
    mask[0, :_PADDING] = 0
    padded = {"input_ids": ids[:, : _PROMPT - 1], "attention_mask": mask}
    steps = [Step(inputs=prompt, tokens=_BATCH * _PROMPT)]
    if getattr(model.config, "is_encoder_decoder", False):
        for inputs in (prompt, padded):
            inputs["decoder_input_ids"] = ids[:, :4]
    elif _cache_name(model) is not None:
        following = {"input_ids": ids[:, _PROMPT:], "attention_mask": ones}
        steps.append(Step(inputs=following, tokens=_BATCH, continues=True))
    if "attention_mask" in inspect.signature(type(model).forward).parameters:
        is_decoder = getattr(model.config, "is_encoder_decoder", False)
        seen = None if is_decoder else mask.bool()
        steps.append(Step(inputs=padded, tokens=_BATCH * (_PROMPT - 1), seen=seen))
    return steps


def _random_ids(model: Any, length: int) -> torch.Tensor:
    """int64 [B, length] without the ids that a configuration gives a meaning."""
    table = model.get_input_embeddings()
    size = int(table.weight.shape[0])
    special = _special_ids(model.config)
    plain = torch.tensor([i for i in range(min(size, 4096)) if i not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(plain), (_BATCH, length), generator=generator)
    return plain[picked].to(next(model.parameters()).device)


def _special_ids(config: Any) -> set[int]:
    found: set[int] = set()
    values = config.to_dict().items()
    for name, value in values:
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            found |= {v for v in (value if isinstance(value, list) else [value]) if v is not None}
    return {value for value in found if isinstance(value, int)}


def _image_step(model: Any) -> Step:
    config = getattr(model.config, "vision_config", model.config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if size is None:
        raise RoutingError(
            f"routing of {type(model).__name__}",
            "a configuration with image_size",
            "none",
            "pass example_inputs: a list of what its forward takes, by name",
        )
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    weight = next(model.parameters())
    pixels = torch.randn(
        _BATCH, channels, height, width, generator=torch.Generator().manual_seed(0)
    )
    return Step(inputs={"pixel_values": pixels.to(weight.device, weight.dtype)}, tokens=_BATCH)


def _cache_name(model: Any) -> str | None:
    """How the model's forward calls the cache of what it has seen."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def run_steps(model: Any, steps: Sequence[Step], before: Any = None) -> list[torch.Tensor | None]:
    """Runs the steps in order without gradients; the main result of each, None for one that needs
    a cache where the model has returned none. before(step): called first."""
    results: list[torch.Tensor | None] = []
    cache: Any = None
    name = _cache_name(model)
    with torch.no_grad():
        for step in steps:
            inputs = dict(step.inputs)
            if step.continues:
                if cache is None or name is None:
                    results.append(None)
                    continue
                inputs[name] = cache
            elif name is not None and "use_cache" not in inputs and len(steps) > 1:
                inputs["use_cache"] = True
            if before is not None:
                before(step)
            output = model(**inputs)
            cache = next((output[n] for n in _CACHES if _has(output, n)), None)
            results.append(_main_result(output))
    return results


def _has(output: Any, name: str) -> bool:
    return isinstance(output, Mapping) and output.get(name) is not None


def _main_result(output: Any) -> torch.Tensor | None:
    values = output.values() if isinstance(output, Mapping) else output
    values = (values,) if isinstance(values, torch.Tensor) else values
    return next((v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def largest_difference(
    steps: Sequence[Step],
    got: Sequence[torch.Tensor | None],
    want: Sequence[torch.Tensor | None],
) -> float:
    """Largest difference as a share of the largest wanted value; infinite where one is missing or
    is not a number."""
    worst = 0.0
    for step, mine, other in zip(steps, got, want, strict=True):
        if mine is None and other is None:
            continue
        if mine is None or other is None or mine.shape != other.shape:
            return float("inf")
        if step.seen is not None and mine.shape[:2] == step.seen.shape:
            mine, other = mine[step.seen], other[step.seen]
        error = (mine.double() - other.double()).abs().max()
        share = float(error / other.double().abs().max().clamp(min=1e-30))
        worst = max(worst, share) if share == share else float("inf")
    return worst
