"""Latent and compressed attention in torch: listed rows are copied, widened and multiplied.

Right on any platform, for every cache format, and slow by the copies: each query's rows are written
and read once more in 16 bits. The dense form serves requests with index lists too, by ignoring
them: that is another model, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hal.candidates import Bind, Kernel, KernelCandidate, Leaf, Work
from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.compressed_attention import (
    CompressedAttentionMetadata,
    CompressedAttentionRequest,
)
from hal.ops.compressed_attention import flops as compressed_flops
from hal.ops.formats import DTYPE_BYTES
from hal.ops.mla_attention import MlaAttentionRequest
from hal.ops.mla_attention import flops as mla_flops
from hal.reasons import Reason
from hal.tiers import Tier
from hal_backends.gpu.limits import flag, gather, scope
from hal_backends.gpu.offers import Offer, on_device, work_of
from hal_backends.gpu.paged import physical_rows, window_rows
from hal_backends.gpu.semantics import DENSE_FOR_SPARSE

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32")
_ROWS_AT_ONCE = 64 << 10  # listed rows that are widened at a time


def candidates(op: str, device: DeviceSpec) -> Sequence[KernelCandidate]:
    return on_device(_OFFERS, op, device)


def _listed_mla(r: MlaAttentionRequest) -> list[Reason]:
    return gather(scope("dtype", r.dtype, _DTYPES), scope("index lists", r.top_k > 0, (True,)))


def _dense_mla(r: MlaAttentionRequest) -> list[Reason]:
    return scope("dtype", r.dtype, _DTYPES)


def _compressed(r: CompressedAttentionRequest) -> list[Reason]:
    listed = r.top_k > 0 or not r.compress_ratio
    return gather(
        scope("dtype", r.dtype, _DTYPES),
        flag("index lists or window only", listed, required=True),
    )


def _listed_work(r: MlaAttentionRequest, tokens: int) -> Work:
    pairs = mla_flops(r, tokens) / (2.0 * r.num_heads * (r.row_dim + r.kv_lora_rank))
    return work_of(
        r, tokens, unit=r.dtype, more_bytes=2.0 * pairs * r.row_dim * DTYPE_BYTES[r.dtype]
    )


def _dense_work(r: MlaAttentionRequest, tokens: int) -> Work:
    """All cached rows, whatever the lists say; scores in memory, in float32."""
    keys = r.context_tokens if r.phase == "decode" else tokens
    pairs = float(tokens * keys)
    rows = pairs if r.phase == "decode" else float(tokens)
    return work_of(
        r,
        tokens,
        unit=r.dtype,
        flops=2.0 * r.num_heads * (r.row_dim + r.kv_lora_rank) * pairs,
        more_bytes=2.0 * rows * r.row_dim * DTYPE_BYTES[r.dtype] + 16.0 * r.num_heads * pairs,
    )


def _compressed_work(r: CompressedAttentionRequest, tokens: int) -> Work:
    pairs = compressed_flops(r, tokens) / (4.0 * r.num_heads * r.head_dim)
    return work_of(
        r, tokens, unit=r.dtype, more_bytes=2.0 * pairs * r.head_dim * DTYPE_BYTES[r.dtype]
    )


def attend_listed(
    q: torch.Tensor,
    rows: torch.Tensor,
    is_there: torch.Tensor,
    value_dim: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, D] over each query's own rows [T, K, D], those that are there [T, K]; values are
    the first `value_dim` of a row. -> [T, H, value_dim]; a query without rows is zero."""
    import torch

    scores = torch.bmm(q, rows.transpose(1, 2)).float() * scale
    scores = scores.masked_fill(~is_there[:, None, :], float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1).expand(scores.shape[0], -1, 1)
        weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
        weights = weights.masked_fill(~is_there.any(1)[:, None, None], 0.0)
    return torch.bmm(weights.to(q.dtype), rows[..., :value_dim])


def _load_listed_mla() -> Bind:
    import torch

    from hal.ops.kv_formats import read_rows

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        step = max(1, _ROWS_AT_ONCE // request.top_k)

        def kernel(
            q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, indices: torch.Tensor
        ) -> torch.Tensor:
            listed = physical_rows(
                indices, meta, meta.block_table, request.block_size, is_causal=request.is_causal
            )
            heads = q.reshape(-1, request.num_heads, request.row_dim)
            out = []
            pairs = zip(torch.split(heads, step), torch.split(listed, step), strict=True)
            for part, lists in pairs:
                slots = lists.clamp(min=0).flatten()
                rows = read_rows(
                    request.kv_format, kv_cache, request.block_size, slots, q.dtype
                ).view(*lists.shape, request.row_dim)
                out.append(attend_listed(part, rows, lists >= 0, request.kv_lora_rank, scale))
            return torch.cat(out).flatten(1)

        return kernel

    return bind


def _load_dense_mla() -> Bind:
    from torch.nn.functional import scaled_dot_product_attention

    from hal.ops.kv_formats import read_rows, slots_of

    def bind(request: MlaAttentionRequest, *, scale: float) -> Kernel:
        def kernel(
            q: torch.Tensor,
            kv_cache: torch.Tensor,
            meta: AttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            out = q.new_empty((q.shape[0], request.num_heads * request.kv_lora_rank))
            starts = meta.query_start_loc.tolist()
            for i, seq_len in enumerate(meta.seq_lens.tolist()):
                span = slice(starts[i], starts[i + 1])
                if span.start == span.stop:
                    continue
                mask, at = _dense_mask(request, span.stop - span.start, seq_len, q.device)
                slots = slots_of(meta.block_table[i], at, request.block_size)
                rows = read_rows(request.kv_format, kv_cache, request.block_size, slots, q.dtype)
                heads = q[span].reshape(1, -1, request.num_heads, request.row_dim).transpose(1, 2)
                keys = rows.expand(1, request.num_heads, -1, -1)
                values = keys[..., : request.kv_lora_rank]
                result = scaled_dot_product_attention(
                    heads, keys, values, attn_mask=mask, scale=scale
                )
                out[span] = result.transpose(1, 2).flatten(2)[0]
            return out

        return kernel

    return bind


def _dense_mask(
    request: MlaAttentionRequest, queries: int, keys: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(what each query sees, or None for all; the positions of the keys)."""
    import torch

    at = torch.arange(keys, device=device)
    if not request.is_causal or queries == 1:
        return None, at
    own = torch.arange(keys - queries, keys, device=device)
    return at[None, :] <= own[:, None], at


def _load_compressed() -> Bind:
    import torch

    from hal.ops.kv_formats import read_rows

    def bind(
        request: CompressedAttentionRequest, *, scale: float, sinks: torch.Tensor | None = None
    ) -> Kernel:
        step = max(1, _ROWS_AT_ONCE // (request.window + request.top_k))

        def widened(name: str, cache: torch.Tensor, lists: torch.Tensor, like: Any) -> torch.Tensor:
            slots = lists.clamp(min=0).flatten()
            rows = read_rows(name, cache, request.block_size, slots, like.dtype)
            return rows.view(*lists.shape, request.head_dim)

        def kernel(
            q: torch.Tensor,
            window_cache: torch.Tensor,
            main_cache: torch.Tensor | None,
            meta: CompressedAttentionMetadata,
            indices: torch.Tensor | None = None,
        ) -> torch.Tensor:
            size, table = request.block_size, meta.main_block_table
            near = window_rows(meta, q.shape[0], request.window, size)
            far = near[:, :0]
            if main_cache is not None and indices is not None and table is not None:
                far = physical_rows(indices, meta, table, size, ratio=request.compress_ratio)
            heads = q.reshape(-1, request.num_heads, request.head_dim)
            out = []
            parts = [torch.split(x, step) for x in (heads, near, far)]
            for part, a, b in zip(*parts, strict=True):
                rows = widened(request.window_format, window_cache, a, q)
                if main_cache is not None and b.shape[1]:
                    more = widened(request.main_format, main_cache, b, q)
                    rows = torch.cat((rows, more), dim=1)
                is_there = torch.cat((a, b), dim=1) >= 0
                out.append(attend_listed(part, rows, is_there, request.head_dim, scale, sinks))
            return torch.cat(out).flatten(1)

        return kernel

    return bind


def _offer(
    op: str,
    name: str,
    summary: str,
    check: Callable[[Any], Sequence[Reason]],
    load: Callable[[], Bind],
    work: Callable[[Any, int], Work],
    leaf: str,
    **more: Any,
) -> Offer:
    return Offer(
        op=op,
        implementation=name,
        tier=Tier.PORTABLE,
        summary=summary,
        check=check,
        load=load,
        leaf=(Leaf(kind="aten_op", name=f"aten::{leaf}"),),
        work=work,
        **more,
    )


_OFFERS: tuple[Offer, ...] = (
    _offer(
        "mla_attention",
        "torch_listed",
        "copies and widens each query's listed rows, then two batched products",
        _listed_mla,
        _load_listed_mla,
        _listed_work,
        "bmm",
    ),
    _offer(
        "mla_attention",
        "torch_dense",
        "copies all cached rows of a sequence, then torch's SDPA; ignores index lists",
        _dense_mla,
        _load_dense_mla,
        _dense_work,
        "scaled_dot_product_attention",
        notes=lambda r: (DENSE_FOR_SPARSE,) if r.top_k else (),
    ),
    _offer(
        "compressed_attention",
        "torch_listed",
        "copies and widens each query's window and listed entries, then two batched products",
        _compressed,
        _load_compressed,
        _compressed_work,
        "bmm",
    ),
)
