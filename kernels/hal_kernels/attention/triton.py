"""Binds the Triton attention kernels to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata, AttentionRequest
from hal.ops.kv_write import check_scales
from hal_kernels.attention.triton_kernels import (
    _attention_decode_kernel,
    _attention_merge_kernel,
    _attention_prefill_kernel,
)
from hal_kernels.attention.triton_limits import form_of_request, rows_of
from hal_kernels.attention.triton_tuning import shape_of
from hal_kernels.attention.triton_variants import (
    MERGE_WARPS,
    SPLIT_KEYS,
    decode_tiles,
    merge_heads,
    tiles_of_form,
)
from hal_kernels.gemm.triton import target_of
from hal_kernels.kv_write.cache_dtypes import as_compiled
from hal_kernels.tuning.store import tuned_rows

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def bind(
    request: AttentionRequest,
    device: DeviceSpec,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Attention:
    """kernel(q[T, H*D], k_cache[N, P, K, D], v_cache[N, P, K, DV], meta) -> out[T, H*DV].

    Rows of q that belong to no sequence keep whatever was in the memory of the result. Raises
    ValueError for scales that the request does not have.
    """
    check_scales("attention", request.has_kv_scales, k_scale, v_scale)
    shared = {
        "GROUP": request.num_heads // request.num_kv_heads,
        "HEAD_DIM": request.head_dim,
        "V_HEAD_DIM": request.v_head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(request.head_dim)),
        "BLOCK_DV": max(16, triton.next_power_of_2(request.v_head_dim)),
        "PAGE": request.block_size,
        "WINDOW": request.window,
        "SOFTCAP": request.softcap,
    }
    if request.phase == "decode":
        return _bind_decode(request, device, shared, (scale * k_scale, v_scale), sinks)
    return _bind_prefill(request, device, shared, (scale * k_scale, v_scale), sinks)


def _strides(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, ...]:
    return (*k_cache.stride()[:3], *v_cache.stride()[:3])


def _bind_prefill(
    request: AttentionRequest,
    device: DeviceSpec,
    shared: dict[str, Any],
    scales: tuple[float, float],
    sinks: torch.Tensor | None,
) -> Attention:
    widest = max(shared["BLOCK_D"], shared["BLOCK_DV"])
    is_fp8 = request.kv_dtype != request.dtype
    default = tiles_of_form(target_of(device), widest, form_of_request(request), is_fp8=is_fp8)
    tuned = tuned_rows(shape_of(request, device), device)
    heads, width = request.num_heads, request.num_heads * request.v_head_dim

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        out = q.new_empty((q.shape[0], width))
        sequences = meta.seq_lens.shape[0]
        k_cache, v_cache = (as_compiled(cache, device.arch) for cache in (k_cache, v_cache))
        tiles = tuned.choose(q.shape[0], default)
        blocks = -(-meta.max_query_len // tiles["BLOCK_M"])
        if q.shape[0] and blocks:
            _attention_prefill_kernel[(blocks, heads, sequences)](
                q, k_cache, v_cache, out, q if sinks is None else sinks,
                meta.query_start_loc, meta.seq_lens, meta.block_table,
                *scales, q.stride(0), out.stride(0), meta.block_table.stride(0),
                *_strides(k_cache, v_cache),
                IS_CAUSAL=request.is_causal, HAS_SINKS=sinks is not None, **shared, **tiles,
            )  # fmt: skip
        return out

    return kernel


def _bind_decode(
    request: AttentionRequest,
    device: DeviceSpec,
    shared: dict[str, Any],
    scales: tuple[float, float],
    sinks: torch.Tensor | None,
) -> Attention:
    target, widest = target_of(device), max(shared["BLOCK_D"], shared["BLOCK_DV"])
    is_fp8 = request.kv_dtype != request.dtype
    default = decode_tiles(target, widest, rows_of(request), is_fp8=is_fp8)
    tuned, merged = tuned_rows(shape_of(request, device), device), merge_heads(target, widest)
    heads, width = request.num_heads, request.num_heads * request.v_head_dim

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        sequences = meta.seq_lens.shape[0]
        tiles = tuned.choose(sequences, default)
        splits = max(1, -(-meta.max_seq_len // SPLIT_KEYS))
        out = q.new_empty((q.shape[0], width))
        if not sequences:
            return out
        k_cache, v_cache = (as_compiled(cache, device.arch) for cache in (k_cache, v_cache))
        scores = torch.float32
        part = q.new_empty((sequences, heads, splits, request.v_head_dim), dtype=scores)
        peak = q.new_empty((sequences, heads, splits), dtype=scores)
        total = torch.empty_like(peak)
        _attention_decode_kernel[(splits, request.num_kv_heads, sequences)](
            q, k_cache, v_cache, part, peak, total,
            meta.query_start_loc, meta.seq_lens, meta.block_table,
            scales[0], heads, splits, q.stride(0), meta.block_table.stride(0),
            *_strides(k_cache, v_cache),
            BLOCK_H=rows_of(request), SPLIT=SPLIT_KEYS, **shared, **tiles,
        )  # fmt: skip
        _attention_merge_kernel[(-(-heads // merged), sequences)](
            part, peak, total, out, q if sinks is None else sinks, meta.query_start_loc,
            heads, splits, scales[1], out.stride(0),
            BLOCK_H=merged, V_HEAD_DIM=request.v_head_dim, BLOCK_DV=shared["BLOCK_DV"],
            HAS_SINKS=sinks is not None, num_warps=MERGE_WARPS,
        )  # fmt: skip
        return out

    return kernel
