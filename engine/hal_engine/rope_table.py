"""Cosine and sine tables of rotary position embeddings (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hal_engine.config import ConfigError, ModelConfig
from hal_engine.config_parts import RopeConfig

if TYPE_CHECKING:
    import torch


def rope_cos_sin(config: ModelConfig, max_len: int) -> torch.Tensor:
    """fp32 table [max_len, head_dim]: row p holds cos(p·f) for the head_dim/2 frequencies f, then
    sin(p·f), both times the attention factor of yarn.

    Raises ConfigError for `dynamic` scaling beyond max_position_embeddings: there the frequencies
    depend on the length of each sequence and no table of positions exists.
    """
    import torch

    if config.rope.type == "dynamic" and max_len > config.max_position_embeddings:
        raise ConfigError(
            config.source,
            "rope type 'dynamic'",
            f"a context of at most max_position_embeddings ({config.max_position_embeddings})",
            max_len,
            "beyond it the frequencies depend on the sequence's length; lower --max-model-len",
        )
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    # Positions above 2^24 are not exact in fp32; contexts are far below.
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
    factor = config.rope.attention_factor
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim/2]: radians per position, after the scaling of `rope`."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.type == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    plain: torch.Tensor = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, plain)
    return plain  # default, and dynamic within the trained context


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    import torch

    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    stretched = plain / rope.factor
    blend = (original / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * plain / rope.factor + blend * plain
    is_long = wavelengths > original / rope.low_freq_factor
    is_short = wavelengths < original / rope.high_freq_factor
    return torch.where(is_long, stretched, torch.where(is_short, plain, between))


def _yarn(rope: RopeConfig, head_dim: int, periods: torch.Tensor) -> torch.Tensor:
    """YaRN, "NTK-by-parts" (https://arxiv.org/abs/2309.00071, section 3.2)."""
    import torch

    def dimension_of(rotations: float) -> float:
        """The dimension whose wave makes `rotations` turns over the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return (1.0 / (rope.factor * periods)) * (1 - kept) + (1.0 / periods) * kept
