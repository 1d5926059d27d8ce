"""The rotary settings of a Hugging Face configuration, in the old and the new spelling.

transformers before 5: `rope_theta` at the top level and `rope_scaling` for the scaling.
transformers 5: both in `rope_parameters`.
"""

from __future__ import annotations

import math

from hal_engine.config import said
from hal_engine.config_parts import RopeConfig, RopeType
from hal_engine.config_values import StrictValues

DEFAULT_THETA = 10_000.0
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")

_KEYS_OF_EVERY_TYPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope(values: StrictValues, max_position_embeddings: int) -> RopeConfig:
    """Rope settings; refuses unknown types, partial rotation, and keys it does not understand."""
    parameters = _parameters(values)
    top_theta = values.number("rope_theta", above=1.0, default=DEFAULT_THETA)
    has_top_theta = "rope_theta" in values
    if parameters is None:
        _refuse_partial(values)
        return RopeConfig(theta=top_theta)
    theta = parameters.number("rope_theta", above=1.0, default=top_theta)
    if has_top_theta and theta != top_theta:
        raise parameters.error("rope_theta", f"the top-level rope_theta ({top_theta:g})", theta)
    _refuse_partial(values)
    _refuse_partial(parameters)
    return read_rope_block(parameters, theta, max_position_embeddings)


def read_rope_block(parameters: StrictValues, theta: float, max_positions: int) -> RopeConfig:
    """One object of rotary settings; every key of it must be one that its type has."""
    rope = _scaled(parameters, _rope_type(parameters), theta, max_positions)
    unread = set(parameters.unread_keys()) - _KEYS_OF_EVERY_TYPE
    for key in sorted(unread):
        if key in parameters:
            raise parameters.error(
                key, f"no setting beyond those of rope type {rope.type!r}", parameters.raw(key)
            )
    return rope


def _parameters(values: StrictValues) -> StrictValues | None:
    new, old = values.mapping("rope_parameters"), values.mapping("rope_scaling")
    if (
        new is not None
        and old is not None
        and values.raw("rope_parameters") != values.raw("rope_scaling")
    ):
        raise values.error(
            "rope_scaling",
            "one of rope_parameters and rope_scaling",
            said("both, and they differ"),
            "remove the one that is not meant",
        )
    return new if new is not None else old


def _rope_type(parameters: StrictValues) -> RopeType:
    key = "rope_type" if "rope_type" in parameters else "type"
    name = parameters.string(key, default="default")
    parameters.raw("type")
    for supported in SUPPORTED_ROPE_TYPES:
        if name == supported:
            return supported
    raise parameters.error(key, f"one of {', '.join(SUPPORTED_ROPE_TYPES)}", name)


def _refuse_partial(values: StrictValues) -> None:
    if values.number("partial_rotary_factor", default=1.0) != 1.0:
        raise values.error(
            "partial_rotary_factor",
            "1 (the whole head is rotated)",
            values.raw("partial_rotary_factor"),
        )


def _scaled(
    values: StrictValues, rope_type: RopeType, theta: float, max_positions: int
) -> RopeConfig:
    if rope_type == "default":
        # `factor` and the like in a default block would be dead settings: left unread, so refused.
        return RopeConfig(theta=theta)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(theta=theta, type=rope_type, factor=_factor(values))
    original = values.integer(
        "original_max_position_embeddings", most=2**31 - 1, default=max_positions
    )
    if rope_type == "llama3":
        return _llama3(values, theta, original)
    return _yarn(values, theta, original, max_positions)


def _factor(values: StrictValues, default: float | None = None) -> float:
    factor = values.number("factor", most=1e6, default=default)
    if factor < 1:
        raise values.error("factor", "a factor of at least 1", factor)
    return factor


def _llama3(values: StrictValues, theta: float, original: int) -> RopeConfig:
    low = values.number("low_freq_factor", most=1e6)
    high = values.number("high_freq_factor", most=1e6)
    if high <= low:
        raise values.error("high_freq_factor", f"more than low_freq_factor ({low:g})", high)
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=_factor(values),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(values: StrictValues, theta: float, original: int, max_positions: int) -> RopeConfig:
    ratio = max_positions / original
    factor = _factor(values, default=ratio)
    beta_fast = values.number("beta_fast", most=1e6, default=32.0)
    beta_slow = values.number("beta_slow", most=1e6, default=1.0)
    if beta_fast < beta_slow:
        raise values.error("beta_fast", f"at least beta_slow ({beta_slow:g})", beta_fast)
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_yarn_attention_factor(values, factor),
        truncate=values.boolean("truncate", default=True),
    )


def _yarn_attention_factor(values: StrictValues, factor: float) -> float:
    """The factor on cos and sin: given, or 0.1·m·ln(factor)+1 (YaRN, equation 22; with the
    quotient of two such terms where both `mscale` and `mscale_all_dim` are set)."""
    mscale = values.number("mscale", above=-1e-9, most=1e3, default=0.0)
    mscale_all = values.number("mscale_all_dim", above=-1e-9, most=1e3, default=0.0)
    if "attention_factor" in values:
        return values.number("attention_factor", most=1e3)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and mscale_all:
        return magnitude(mscale) / magnitude(mscale_all)
    return magnitude(1.0)
