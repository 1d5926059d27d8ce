"""Dense attention on the CPU by torch's fused kernel, called by its own name so that it stays it.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes grouped heads as they are, a mask and
equal head sizes, and returns the logarithm of the denominators. A sink is one more term of the
denominator: the result times sigmoid(logsumexp - sink), exactly. Where the sizes of keys and values
differ, the smaller is padded with zeros, exactly too. A mask that shows each block of queries few
keys (a sliding window) is read in spans; a list of one query is gathered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

from hal.ops.dense_attention import DenseAttentionRequest, check_call, check_sinks, listed_keys

Kernel = Callable[..., torch.Tensor]

MIN_BLOCK = 64  # queries of a span: below this, calls cost more than keys


def bind_flash(
    request: DenseAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Kernel:
    """kernel(q, k, v, mask, lists) as the reference's, for any mask and no lists."""
    check_sinks(request, sinks)
    limits = None if sinks is None else sinks.float().view(1, -1, 1)
    flash = _flash(request, scale, limits)

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        lists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_call(request, mask, lists)
        is_causal = request.mask == "none" and request.is_causal and q.shape[2] > 1
        if is_causal and q.shape[2] != k.shape[2]:  # the kernel aligns to the first key
            mask, is_causal = _causal_mask(q.shape[2], k.shape[2], q.device), False
        return flash(q, k, v, mask, is_causal)

    return kernel


def bind_flash_spans(
    request: DenseAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Kernel:
    """The same for a sliding window: each block of queries reads the keys that its mask shows."""
    check_sinks(request, sinks)
    limits = None if sinks is None else sinks.float().view(1, -1, 1)
    flash = _flash(request, scale, limits)
    block = max(request.window, MIN_BLOCK)

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        lists: torch.Tensor | None = None,
    ) -> torch.Tensor:
        check_call(request, mask, lists)
        parts = []
        for start in range(0, q.shape[2], block):
            queries = q[:, :, start : start + block]
            seen = mask[:, :, start : start + block]
            low, high = _span(seen)
            parts.append(
                flash(queries, k[:, :, low:high], v[:, :, low:high], seen[..., low:high], False)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    return kernel


def bind_flash_lists(
    request: DenseAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
) -> Kernel:
    """For lists of keys. One query a sequence: its keys are gathered first. Several: every key is
    read, and the lists hide the others."""
    check_sinks(request, sinks)
    limits = None if sinks is None else sinks.float().view(1, -1, 1)
    flash = _flash(request, scale, limits)

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        lists: torch.Tensor,
    ) -> torch.Tensor:
        check_call(request, mask, lists)
        if q.shape[2] == 1 and lists.shape[-1] < k.shape[2]:
            return flash(q, *_gathered(k, v, mask, lists), False)
        seen = listed_keys(lists, k.shape[2])
        if mask is None and request.is_causal and q.shape[2] > 1:
            mask = _causal_mask(q.shape[2], k.shape[2], q.device)
        if mask is None or mask.dtype == torch.bool:
            return flash(q, k, v, seen if mask is None else seen & mask, False)
        return flash(q, k, v, mask.masked_fill(~seen, float("-inf")), False)

    return kernel


def _gathered(
    k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, lists: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The listed keys and values, and which of them are seen: k [B, Hk, K, D], v, [B, 1, 1, K]."""
    is_key = (lists >= 0) & (lists < k.shape[2])
    at = torch.where(is_key, lists, 0).long()  # [B, 1, K]
    where = at[..., None]
    keys = torch.gather(k, 2, where.expand(-1, k.shape[1], -1, k.shape[3]))
    values = torch.gather(v, 2, where.expand(-1, v.shape[1], -1, v.shape[3]))
    seen = is_key[:, None]
    if mask is None:
        return keys, values, seen
    wide = mask.expand(lists.shape[0], *mask.shape[1:])
    chosen = torch.gather(wide, 3, at[:, None].expand(-1, wide.shape[1], -1, -1))
    if mask.dtype == torch.bool:
        return keys, values, chosen & seen
    return keys, values, chosen.masked_fill(~seen, float("-inf"))


def _span(seen: torch.Tensor) -> tuple[int, int]:
    """First key that any query sees and the one after the last; one key if none is seen."""
    columns = seen.flatten(0, -2).any(dim=0).nonzero()
    return (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (0, 1)


def _causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """bool [1, 1, Q, S], the last query at the last key."""
    query_at = torch.arange(keys - queries, keys, device=device)[:, None]
    return (torch.arange(keys, device=device)[None, :] <= query_at)[None, None]


def _flash(request: DenseAttentionRequest, scale: float, limits: torch.Tensor | None) -> Kernel:
    """flash(q, k, v, mask, is_causal) -> [B, Q, H, Dv], padding what must have equal sizes."""
    gap = request.head_dim - request.v_head_dim
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def flash(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        if gap > 0:
            v = functional.pad(v, (0, gap))
        elif gap < 0:
            q, k = functional.pad(q, (0, -gap)), functional.pad(k, (0, -gap))
        q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
        if mask is not None:
            mask = _added(mask, q, k)
        out, denominators = op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
        if gap > 0:
            out = out[..., : request.v_head_dim]
        if limits is not None:
            share = torch.sigmoid(denominators - limits)  # [B, H, Q]
            out = out * share.unsqueeze(-1).to(out.dtype)
        rows: torch.Tensor = out.transpose(1, 2)
        return rows

    return flash


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask as the kernel reads it: what is added, in the dtype of q, [B or 1, H or 1, Q, S]."""
    if mask.dtype == torch.bool:
        hidden = torch.full((), float("-inf"), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, torch.zeros((), dtype=q.dtype, device=q.device), hidden)
    return mask.to(q.dtype).expand(mask.shape[0], mask.shape[1], q.shape[2], k.shape[2])
