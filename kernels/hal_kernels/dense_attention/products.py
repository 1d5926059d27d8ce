"""Dense attention as two batched products and a softmax in torch: everything, and nothing fused.

Heads of one group are rows of one product, so keys and values are not repeated. Scores, mask and
weights are written to memory in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.ops.dense_attention import DenseAttentionRequest, check_call, check_sinks, hidden_keys


def bind_products(
    request: DenseAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """kernel(q, k, v, mask, lists) as the reference's, on any device."""
    check_sinks(request, sinks)
    groups = request.num_heads // request.num_kv_heads

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        lists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_call(request, mask, lists)
        batch, heads, queries, _ = q.shape
        rows = q.reshape(batch * request.num_kv_heads, groups * queries, request.head_dim)
        keys = k.reshape(-1, k.shape[2], request.head_dim)
        scores = torch.bmm(rows, keys.transpose(1, 2)).float() * scale
        scores = scores.view(batch, heads, queries, -1)
        if request.softcap:
            scores = torch.tanh(scores / request.softcap) * request.softcap
        if request.mask == "bias" and mask is not None:
            scores = scores + mask
        hidden = hidden_keys(request, queries, k.shape[2], mask, lists, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = softmax_with_sinks(scores, sinks).to(v.dtype)
        values = v.reshape(-1, v.shape[2], request.v_head_dim)
        out = torch.bmm(weights.view(rows.shape[0], groups * queries, -1), values)
        return out.view(batch, heads, queries, request.v_head_dim).transpose(1, 2)

    return kernel


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights of [B, H, Q, S]: sinks [H] are in the denominator; zeros for a query without keys."""
    peak = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.to(scores.dtype).view(1, -1, 1, 1))
    peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # -inf less -inf is not a number
    weights = torch.exp(scores - peak)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(scores.dtype).view(1, -1, 1, 1) - peak)
    return weights / total.clamp(min=torch.finfo(scores.dtype).tiny)
