"""Binds the Triton attention over window and entries to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.compressed_attention import CompressedAttentionMetadata, CompressedAttentionRequest
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal_kernels.compressed_attention.triton_kernels import _compressed_attention_kernel
from hal_kernels.compressed_attention.triton_tuning import shape_of
from hal_kernels.compressed_attention.triton_variants import (
    HEADS_TOGETHER,
    SPLIT_ENTRIES,
    is_whole,
)
from hal_kernels.compressed_attention.v41_kernels import _compressed_attention_v41_kernel
from hal_kernels.gemm.triton import target_of
from hal_kernels.mla_attention.packed_tiles import packed_tiles
from hal_kernels.mla_attention.shared_rows import _merge_splits_kernel
from hal_kernels.mla_attention.triton_variants import chunks, merge_warps, tiles
from hal_kernels.tuning.key_tiles import STEPS, chosen
from hal_kernels.tuning.store import tuned_rows

_PACKED = "v4_584"


def bind(
    request: CompressedAttentionRequest,
    device: DeviceSpec,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> Callable[..., torch.Tensor]:
    """kernel(q[T, H*D], window_cache, main_cache, meta, indices[T, top_k]=None) -> out[T, H*D].

    Rows of q that belong to no sequence keep whatever was in the memory of the result.
    """
    # Without entries the format of their rows says nothing, and what is judged is the window's.
    main_format = request.main_format if request.compress_ratio else request.window_format
    kv_format = _PACKED if _PACKED in (request.window_format, main_format) else "bf16"
    is_v41 = request.window_format == "v41_528"
    target = target_of(device)
    options = packed_tiles(target) if is_v41 else tiles(target, kv_format, HEADS_TOGETHER)
    heads, dim = request.num_heads, request.head_dim
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "TOP_K": request.top_k,
        "WINDOW": request.window,
        "RATIO": request.compress_ratio,
        "SPLIT": SPLIT_ENTRIES,
        "PAGE": request.block_size,
        "HAS_SINKS": sinks is not None,
        "IS_WHOLE": is_whole(
            is_decode=request.phase == "decode",
            top_k=request.top_k,
            compress_ratio=request.compress_ratio,
        ),
        **{name: value for name, value in options.items() if name not in STEPS},
        **chunks(dim, options["CHUNK"]),
    }
    default, tuned = chosen(options), tuned_rows(shape_of(request, device), device)
    if is_v41:
        constants["MAIN_IS_FP4"] = main_format == "fp4_288"
    else:
        constants["WINDOW_IS_PACKED"] = request.window_format == _PACKED
        constants["MAIN_IS_PACKED"] = main_format == _PACKED
    merge = {
        "WIDTH": dim,
        "BLOCK_L": max(16, triton.next_power_of_2(dim)),
        "HAS_SINKS": sinks is not None,
        "num_warps": merge_warps(target),
    }

    def kernel(
        q: torch.Tensor,
        window_cache: torch.Tensor,
        main_cache: torch.Tensor | None,
        meta: CompressedAttentionMetadata,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, one_program = q.shape[0], constants["IS_WHOLE"]
        out = q.new_empty((tokens, heads * dim))
        splits = 1 if one_program else _splits(request, meta)
        blocks = -(-heads // options["BLOCK_H"])
        grid = (meta.max_query_len * splits, blocks, meta.seq_lens.shape[0])
        if not tokens or not min(grid):
            return out
        shape = (1,) if one_program else (tokens, heads, splits)
        part = out if one_program else q.new_empty((*shape, dim), dtype=torch.float32)
        peak, total = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
        lists = meta.seq_lens.view(1, -1) if indices is None else indices
        window_table = meta.window_block_table
        main_table = window_table if meta.main_block_table is None else meta.main_block_table
        sinks_or_any = q if sinks is None else sinks
        steps = tuned.choose(tokens, default)
        outputs = (sinks_or_any, part, peak, total, meta.query_start_loc, meta.seq_lens)
        places = (
            *(window_table, main_table, scale, splits, q.stride(0), lists.stride(0)),
            *(window_table.stride(0), main_table.stride(0)),
        )
        if is_v41:
            main = window_cache if main_cache is None else main_cache
            _compressed_attention_v41_kernel[grid](
                q, window_cache, main, lists, *outputs, *places,
                window_cache.stride(0), main.stride(0), **constants, **steps,
            )  # fmt: skip
        else:
            rows, strides = _rows_of(request, window_cache, main_cache)
            _compressed_attention_kernel[grid](
                q, *rows, lists, *outputs, *places, *strides, **constants, **steps
            )
        if not one_program:
            _merge_splits_kernel[(tokens, heads)](
                part, peak, total, out, sinks_or_any, splits, out.stride(0), **merge
            )
        return out

    return kernel


def _splits(request: CompressedAttentionRequest, meta: CompressedAttentionMetadata) -> int:
    """Programs that share out the entries of a query; the first has the window too."""
    entries = request.top_k or meta.max_seq_len // request.compress_ratio
    return max(1, -(-entries // SPLIT_ENTRIES))


def _rows_of(
    request: CompressedAttentionRequest, window_cache: torch.Tensor, main_cache: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Rows and tails of both caches, and the strides of both; without entries the window's."""
    window, window_tails, window_strides = _layout(request.window_format, window_cache)
    if main_cache is None:
        return (window, window_tails, window, window_tails), (*window_strides, 0, 0)
    main, main_tails, main_strides = _layout(request.main_format, main_cache)
    return (window, window_tails, main, main_tails), (*window_strides, *main_strides)


def _layout(name: str, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
    """Rows, their 16-bit tails, and the strides of pages and rows."""
    if name in PLAIN_FORMATS:
        return cache, cache, (cache.stride(0), cache.stride(1))
    return cache, cache.view(torch.bfloat16), (cache.stride(0), KV_FORMATS[name].data_bytes)
