"""Which entries a query of sparse attention sees, and the softmax over just those."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """float64 for float64, otherwise float32: what references compute in."""
    import torch

    return torch.float64 if x.dtype == torch.float64 else torch.float32


def listed(indices: torch.Tensor, entries: int) -> torch.Tensor:
    """bool [Q, entries]: which entries the lists [Q, K] name; anything out of range is padding."""
    import torch

    is_entry = (indices >= 0) & (indices < entries)
    named = torch.zeros((indices.shape[0], entries + 1), dtype=torch.bool, device=indices.device)
    named.scatter_(1, torch.where(is_entry, indices, entries).long(), True)
    return named[:, :entries]


def softmax_of_seen(
    scores: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Weights of scores [H, Q, K] where `seen` [Q, K]; a query that sees nothing has zeros.

    sinks: [H] logits that take part in the denominator only.
    """
    import torch

    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill(~seen.any(dim=-1)[:, None], 0.0)
