"""Binds the Triton indexer scores to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal_kernels.gemm.triton import target_of
from hal_kernels.index_logits.fp4_kernels import _index_logits_fp4_kernel
from hal_kernels.index_logits.triton_kernels import _index_logits_kernel
from hal_kernels.index_logits.triton_tuning import chosen_tiles, shape_of
from hal_kernels.index_logits.triton_variants import (
    KEY_FORMATS,
    fp4_constants,
    fp4_tiles,
    tiles,
    unit_of,
)
from hal_kernels.tuning.store import tuned_rows

IndexLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def bind(request: IndexLogitsRequest, device: DeviceSpec, *, scale: float) -> IndexLogits:
    """kernel(q[T, H*D], weights[T, H], key_cache, meta) -> float32 [T, max_seq_len // ratio].

    Rows of q that belong to no sequence keep whatever was in the memory of the result.
    """
    is_fp8 = request.dtype == "float8_e4m3fn"
    if is_fp8 and request.key_format == "fp4_68":
        return _bind_fp4(request, device, scale)
    target = target_of(device)
    constants = {
        "HEADS": request.num_heads,
        "HEAD_DIM": request.head_dim,
        "BLOCK_H": max(16, triton.next_power_of_2(request.num_heads)),
        "BLOCK_D": max(32, triton.next_power_of_2(request.head_dim)),
        "PAGE": request.block_size,
        "RATIO": request.compress_ratio,
        "KEY_FORMAT": KEY_FORMATS[request.key_format],
        "Q_IS_FP8": is_fp8,
        "UNIT": unit_of(target) if is_fp8 else "bf16",
    }
    default = chosen_tiles(tiles(target, is_decode=request.phase == "decode"))
    tuned = tuned_rows(shape_of(request, device), device)

    def kernel(
        q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        width = meta.max_seq_len // request.compress_ratio
        out = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
        options = tuned.choose(q.shape[0], default)
        grid = _grid(width, meta, options)
        if q.shape[0] and min(grid):
            keys, scales, places = _layout(request, key_cache)
            _index_logits_kernel[grid](
                q.view(torch.uint8) if is_fp8 else q, weights, keys, scales, out,
                meta.query_start_loc, meta.seq_lens, meta.block_table,
                scale, width, q.stride(0), weights.stride(0), out.stride(0),
                meta.block_table.stride(0), *places, **constants, **options,
            )  # fmt: skip
        return out

    return kernel


def _bind_fp4(request: IndexLogitsRequest, device: DeviceSpec, scale: float) -> IndexLogits:
    """An FP8 query over keys of four bits."""
    target, page = target_of(device), request.block_size
    constants = fp4_constants(target, request.num_heads, page, request.compress_ratio)
    default = chosen_tiles(fp4_tiles(target, is_decode=request.phase == "decode"))
    tuned = tuned_rows(shape_of(request, device), device)
    scale_start = page * KV_FORMATS[request.key_format].data_bytes

    def kernel(
        q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        width = meta.max_seq_len // request.compress_ratio
        out = torch.empty((q.shape[0], width), dtype=torch.float32, device=q.device)
        options = tuned.choose(q.shape[0], default)
        grid = _grid(width, meta, options)
        if q.shape[0] and min(grid):
            _index_logits_fp4_kernel[grid](
                q.view(torch.uint8), weights, key_cache, out,
                meta.query_start_loc, meta.seq_lens, meta.block_table,
                scale, width, q.stride(0), weights.stride(0), out.stride(0),
                meta.block_table.stride(0), key_cache.stride(0), scale_start,
                **constants, **options,
            )  # fmt: skip
        return out

    return kernel


def _grid(width: int, meta: AttentionMetadata, options: Mapping[str, int]) -> tuple[int, int, int]:
    """Tiles of entries, tiles of queries, sequences."""
    tiles_of_queries = -(-meta.max_query_len // options["BLOCK_Q"])
    return -(-width // options["BLOCK_N"]), tiles_of_queries, meta.seq_lens.shape[0]


def _layout(
    request: IndexLogitsRequest, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int, int]]:
    """Keys, scales, and strides of pages and rows, of pages of scales, and where scales begin."""
    if request.key_format in PLAIN_FORMATS:
        return cache, cache, (cache.stride(0), cache.stride(1), 0, 0)
    form = KV_FORMATS[request.key_format]
    start = request.block_size * form.data_bytes
    scales = cache.view(torch.float32) if form.scale == "float32" else cache
    start //= scales.element_size()
    return cache, scales, (cache.stride(0), form.data_bytes, scales.stride(0), start)
