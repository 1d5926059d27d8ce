"""Binds the Triton latent attention to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.kv_formats import PLAIN_FORMATS
from hal.ops.mla_attention import MlaAttentionRequest
from hal_kernels.compute_units import compute_units
from hal_kernels.gemm.triton import target_of
from hal_kernels.mla_attention.shared_rows import _merge_splits_kernel
from hal_kernels.mla_attention.triton_kernels import _mla_attention_kernel
from hal_kernels.mla_attention.triton_tuning import shape_of
from hal_kernels.mla_attention.triton_variants import (
    SPLIT_KEYS,
    chunks,
    count_splits,
    is_wide,
    merge_warps,
    tiles,
    wide_tiles,
)
from hal_kernels.mla_attention.wide_kernels import _mla_attention_wide_kernel
from hal_kernels.tuning.key_tiles import STEPS, chosen
from hal_kernels.tuning.store import tuned_rows

_SCALE_START, _TAIL_START, _ROW_BYTES = 512, 528, 656  # of a row of fp8_656


def bind(
    request: MlaAttentionRequest, device: DeviceSpec, *, scale: float
) -> Callable[..., torch.Tensor]:
    """kernel(q[T, H*(rank+rope)], kv_cache, meta, indices[T, top_k]=None) -> out[T, H*rank].

    Rows of q that belong to no sequence keep whatever was in the memory of the result.
    """
    if is_wide(device.arch, request.num_heads, request.rope_dim):
        attend, options = _mla_attention_wide_kernel, wide_tiles(request.kv_format)
    else:
        attend = _mla_attention_kernel
        options = tiles(
            target_of(device), request.kv_format, request.num_heads,
            is_listed_prompt=request.phase != "decode" and request.top_k > 0,
        )  # fmt: skip
    constants = {
        "HEADS": request.num_heads,
        "RANK": request.kv_lora_rank,
        "ROPE": request.rope_dim,
        "TOP_K": request.top_k,
        "BLOCK_R": max(16, triton.next_power_of_2(max(1, request.rope_dim))),
        "SPLIT": SPLIT_KEYS,
        "PAGE": request.block_size,
        "IS_CAUSAL": request.is_causal,
        "IS_PACKED": request.kv_format == "fp8_656",
        # A prompt has programs enough, and parts of all its queries would fill the memory.
        "IS_WHOLE": request.phase != "decode",
        **{name: value for name, value in options.items() if name not in STEPS},
        **chunks(request.kv_lora_rank, options["CHUNK"]),
    }
    default, tuned = chosen(options), tuned_rows(shape_of(request, device), device)
    heads, rank = request.num_heads, request.kv_lora_rank
    units = compute_units(device)
    merge = {
        "WIDTH": rank,
        "BLOCK_L": max(16, triton.next_power_of_2(rank)),
        "HAS_SINKS": False,
        "num_warps": merge_warps(target_of(device)),
    }

    def kernel(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, is_whole = q.shape[0], constants["IS_WHOLE"]
        out = q.new_empty((tokens, heads * rank))
        keys = request.top_k or meta.max_seq_len
        splits = 1 if is_whole else count_splits(keys, heads, options, units)
        blocks = -(-heads // options["BLOCK_H"])
        grid = (meta.max_query_len * splits, blocks, meta.seq_lens.shape[0])
        if not tokens or not min(grid):
            return out
        shape = (1,) if is_whole else (tokens, heads, splits)
        part = out if is_whole else q.new_empty((*shape, rank), dtype=torch.float32)
        peak, total = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
        lists = meta.seq_lens.view(1, -1) if indices is None else indices
        views, places = _layout(request, kv_cache)
        attend[grid](
            q, *views, lists, part, peak, total,
            meta.query_start_loc, meta.seq_lens, meta.block_table,
            scale, splits, q.stride(0), lists.stride(0), meta.block_table.stride(0), *places,
            **constants, **tuned.choose(tokens, default),
        )  # fmt: skip
        if not is_whole:
            _merge_splits_kernel[(tokens, heads)](
                part, peak, total, out, q, splits, out.stride(0), **merge
            )
        return out

    return kernel


def _layout(
    request: MlaAttentionRequest, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[int, ...]]:
    """Latent parts, scales and rotary parts of a cache, and (page, row) strides of each, with where
    the latter two begin in a row."""
    if request.kv_format in PLAIN_FORMATS:
        page, row = cache.stride(0), cache.stride(1)
        return (cache, cache, cache), (page, row, 0, 0, 0, page, row, request.kv_lora_rank)
    scales, tails = cache.view(torch.float32), cache.view(torch.bfloat16)
    places = (
        *(cache.stride(0), _ROW_BYTES),
        *(scales.stride(0), _ROW_BYTES // 4, _SCALE_START // 4),
        *(tails.stride(0), _ROW_BYTES // 2, _TAIL_START // 2),
    )
    return (cache, scales, tails), places
