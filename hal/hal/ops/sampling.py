"""Sampling filters: top-k, then top-p (nucleus, https://arxiv.org/abs/1904.09751)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hal.ops.request import FLOAT_TOLERANCES, OpFamily, OpRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKTopPRequest(OpRequest):
    """logits float32 [B, V] -> the same with -inf outside the kept set.

    Keeps the k largest (of equal ones the lower index), then the smallest prefix of the descending
    distribution whose probability reaches top_p; at least one token always stays.
    """

    op: ClassVar[str] = "sample.top_k_top_p"

    vocab_size: int


def reference(request: TopKTopPRequest) -> Callable[..., torch.Tensor]:
    """Golden filter by a stable full sort."""
    import torch

    def kernel(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(values.shape[-1], device=logits.device)[None, :]
        values = values.masked_fill(rank >= top_k[:, None].clamp(min=1), float("-inf"))
        probabilities = torch.softmax(values, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        outside = (before >= top_p[:, None]) & (rank > 0) & (top_p[:, None] < 1.0)
        values = values.masked_fill(outside, float("-inf"))
        return torch.full_like(logits, float("-inf")).scatter(-1, order, values)

    return kernel


def flops(request: TopKTopPRequest, tokens: int) -> float:
    return 4.0 * tokens * request.vocab_size


def bytes_moved(request: TopKTopPRequest, tokens: int) -> float:
    return float(tokens * (2 * request.vocab_size * 4 + 12))  # with top_k and top_p


FAMILY = OpFamily(
    name="sample.top_k_top_p",
    request_type=TopKTopPRequest,
    summary="Top-k and top-p filter of logits",
    reference=reference,
    flops=flops,
    bytes_moved=bytes_moved,
    tolerances=FLOAT_TOLERANCES,
)
