"""Stand-ins for libraries of latent attention, index scores and block-scaled products.

As `fake_libraries`: signatures and layouts from the libraries' documentation, computed plainly.
"""

from __future__ import annotations

from typing import Any

import torch


def listed(
    q: torch.Tensor,
    rows: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None = None,
    more: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """q [T, H, D] over rows [R, D] that each query lists, [T, K] with -1 as padding; in float64."""
    out = []
    for i in range(q.shape[0]):
        own = rows[lists[i][lists[i] >= 0].long()]
        if more is not None:
            own = torch.cat((own, more[0][more[1][i][more[1][i] >= 0].long()]))
        scores = q[i].double() @ own.double().T * scale
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        weights = torch.softmax(scores, dim=1)[:, : own.shape[0]]
        out.append(weights @ own.double()[:, :value_dim])
    return torch.stack(out).to(q.dtype)


def rows_of_656(cache: torch.Tensor) -> torch.Tensor:
    """FlashMLA's README: 512 e4m3, 4 float32 scales of 128 values each, 64 bfloat16."""
    raw = cache.reshape(-1, 656).view(torch.uint8)
    values = raw[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    scales = raw[:, 512:528].contiguous().view(torch.float32).double()
    rope = raw[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat(((values * scales[..., None]).flatten(1), rope), dim=1)


def rows_of_584(cache: torch.Tensor) -> torch.Tensor:
    """FlashMLA's V4 pages: 448 e4m3 and 64 bfloat16 of every row, then 7 powers of two (of 64
    values each) and a byte of padding of every row."""
    blocks, size = cache.shape[:2]
    raw = cache.reshape(blocks, -1).view(torch.uint8)[:, : size * 584]
    data = raw[:, : size * 576].reshape(blocks * size, 576)
    codes = raw[:, size * 576 :].reshape(blocks * size, 8)[:, :7]
    values = data[:, :448].contiguous().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
    scales = torch.exp2(codes.double() - 127)
    rope = data[:, 448:].contiguous().view(torch.bfloat16).double()
    return torch.cat(((values * scales[..., None]).flatten(1), rope), dim=1)


class SchedMeta:
    """What get_mla_metadata gives: made anew for each step."""


def get_mla_metadata(*arguments: Any, **more: Any) -> tuple[SchedMeta, None]:
    return SchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: SchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """q [B, 1, H, D], k_cache [blocks, 64, 1, row]; lists are rows of the whole cache."""
    assert softmax_scale is not None
    assert isinstance(tile_scheduler_metadata, SchedMeta)
    assert k_cache.shape[1:3] == (64, 1)
    assert q.shape[1] == 1
    if indices is not None:
        assert is_fp8_kvcache
        assert not causal
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == q.shape[:2]
        unpack = rows_of_656 if k_cache.shape[-1] == 656 else rows_of_584
        more = None
        if extra_k_cache is not None:
            assert extra_indices_in_kvcache is not None
            more = (unpack(extra_k_cache), extra_indices_in_kvcache[:, 0])
        out = listed(
            q[:, 0], unpack(k_cache), indices[:, 0], softmax_scale, head_dim_v, attn_sink, more
        )
        return out[:, None], None
    assert block_table is not None
    assert cache_seqlens is not None
    at = torch.arange(int(cache_seqlens.max()))
    table = block_table.long()
    lists = table[:, at // 64] * 64 + at % 64
    lists = lists.masked_fill(at[None, :] >= cache_seqlens[:, None], -1)
    rows = k_cache.flatten(0, 1)[:, 0]
    return listed(q[:, 0], rows, lists, softmax_scale, head_dim_v)[:, None], None


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, None, None]:
    """q [s_q, h_q, d], kv [s_kv, 1, d], indices [s_q, 1, topk]."""
    assert kv.shape[1] == indices.shape[1] == 1
    assert indices.shape[2] % 128 == 0
    return listed(q, kv[:, 0], indices[:, 0], sm_scale, d_v), None, None


def sparse_mla_sm120_decode_dsv3_2(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    mid_out: torch.Tensor,
    mid_lse: torch.Tensor,
    output: torch.Tensor,
    out_lse: torch.Tensor,
    sm_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    model_type: int = 0,
    chunks_per_block: int | None = None,
    lse_scale: float = 1.0,
) -> torch.Tensor:
    """flashinfer 0.7.4; the scratch as its documentation sizes it."""
    tokens, heads = q.shape[:2]
    padded = 8 if heads == 8 else -(-heads // 16) * 16
    assert mid_out.shape == (tokens, padded, -(-indices.shape[1] // 64), 512)
    assert mid_lse.shape == mid_out.shape[:3]
    assert mid_lse.dtype == torch.float32
    assert kv_cache.dtype == torch.uint8
    return output.copy_(listed(q, rows_of_656(kv_cache), indices, sm_scale, 512))


def sparse_mla_sm120_decode_dsv4(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    mid_out: torch.Tensor,
    mid_lse: torch.Tensor,
    output: torch.Tensor,
    out_lse: torch.Tensor,
    sm_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    chunks_per_block: int | None = None,
    model_type: int | None = None,
    extra_fp4: bool = False,
    lse_scale: float = 1.0,
) -> torch.Tensor:
    """flashinfer 0.7.4: pages of bytes [blocks, page_bytes], one or two caches."""
    assert model_type is None
    assert not extra_fp4
    splits = -(-indices.shape[1] // 64)
    more = None
    if extra_kv_cache is not None:
        assert extra_indices is not None
        splits += -(-extra_indices.shape[1] // 64)
        more = (rows_of_584(_pages(extra_kv_cache)), extra_indices)
    assert mid_out.shape[2] == splits
    rows = rows_of_584(_pages(kv_cache))
    return output.copy_(listed(q, rows, indices, sm_scale, 512, attn_sink, more))


def _pages(cache: torch.Tensor) -> torch.Tensor:
    return cache[:, : 64 * 584].reshape(-1, 64, 584)


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
) -> None:
    """aiter/mla.py: pages of one row, one list of rows per sequence of one query."""
    assert sm_scale is not None
    assert max_seqlen_q == 1
    assert (qo_indptr.diff() == 1).all()
    assert (kv_last_page_lens == 1).all()
    rows = kv_buffer.view(kv_buffer.shape[0], -1)
    for i in range(q.shape[0]):
        own = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])][None]
        o[i] = listed(q[i : i + 1], rows, own, sm_scale, o.shape[-1])[0]


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    sparse_block_size: int,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
) -> torch.Tensor:
    """torch_npu 2.14: TND queries, lists of positions of each query's own sequence, in pages."""
    assert (layout_query, layout_kv) == ("TND", "PA_BSND")
    assert block_table is not None
    assert actual_seq_lengths_query is not None
    size = key.shape[1]
    rows = key.flatten(0, 1)[:, 0]
    sequence = torch.searchsorted(
        actual_seq_lengths_query.contiguous(), torch.arange(query.shape[0]), right=True
    )
    lists = sparse_indices[:, 0].long()
    safe = lists.clamp(min=0)
    slots = block_table.long()[sequence].gather(1, safe // size) * size + safe % size
    return listed(query, rows, slots.masked_fill(lists < 0, -1), scale_value, value.shape[-1])


Scaled = tuple[torch.Tensor, torch.Tensor]


def _wide(values: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """[M, K] values with float32 scales [M / rows, K / 128]."""
    each = scales.double().repeat_interleave(rows, 0)[: values.shape[0]]
    return values.double() * each.repeat_interleave(128, 1)[:, : values.shape[1]]


def fp8_gemm_nt(a: Scaled, b: Scaled, d: torch.Tensor, **more: Any) -> None:
    """deep_gemm: a [M, K] with scales [M, K / 128], b [N, K] with scales of 128x128 blocks."""
    assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn
    assert a[1].dtype == b[1].dtype == torch.float32
    d.copy_(_wide(*a, 1) @ _wide(*b, 128).T)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled, b: Scaled, d: torch.Tensor, grouped_layout: torch.Tensor
) -> None:
    """Rows sorted by expert, each expert's from a multiple of 128 on; -1 marks padding."""
    assert grouped_layout.dtype == torch.int32
    tiles = grouped_layout.view(-1, 128)
    for tile in tiles:
        assert len(set(tile[tile >= 0].tolist())) <= 1, "a tile with rows of two experts"
    wide = _wide(*a, 1)
    for expert in range(b[0].shape[0]):
        rows = grouped_layout == expert
        d[rows] = (wide[rows] @ _wide(b[0][expert], b[1][expert], 128).T).to(d.dtype)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: Any,
    max_context_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """deep_gemm: q [B, 1, H, D], pages [blocks, 64, 1, 132] with all values before all scales."""
    blocks, size = kv_cache.shape[:2]
    raw = kv_cache.reshape(blocks, -1).view(torch.uint8)
    values = raw[:, : size * 128].contiguous().view(torch.float8_e4m3fn).double()
    scales = raw[:, size * 128 :].contiguous().view(torch.float32).double()
    keys = values.view(blocks, size, 128) * scales[..., None]
    logits = torch.full((q.shape[0], max_context_len), float("-inf"))
    for i, length in enumerate(context_lens.tolist()):
        at = torch.arange(length)
        own = keys[block_table[i].long()[at // size], at % size]
        scores = (q[i, 0].double() @ own.T).relu() * weights[i].double()[:, None]
        logits[i, :length] = scores.sum(0).float()
    return logits
