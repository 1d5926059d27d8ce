"""transformers' modules with small random weights, as oracles for single ops."""

from __future__ import annotations

from typing import Any

import torch


def randomised(module: Any, rng: torch.Generator, size: float = 0.3) -> Any:
    """The module with random parameters and float buffers; vectors near one."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.dtype.is_floating_point or "inv_freq" in name:
            continue
        values = torch.randn(tensor.shape, generator=rng) * size
        tensor.data.copy_(values + (1.0 if tensor.dim() == 1 and tensor.numel() > 3 else 0.0))
    return module.eval()


def rope_table(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[positions, rotary_dim] of one cosine and one sine per pair, from transformers' [1, S, n]."""
    return torch.cat((cos[0], sin[0]), dim=1)


def causal_mask(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive [1, 1, queries, keys]; the queries are the last tokens."""
    at = torch.arange(keys - queries, keys)[:, None]
    hidden = torch.arange(keys)[None, :] > at
    return torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
