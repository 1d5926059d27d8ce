"""Prefill attention on the CPU: chunks of new tokens over the paged KV cache in place.

An item is (sequence, kv head, tile of query tokens). It walks the keys in blocks of 64 at fixed
positions: the keys transposed and the values copied once a block into the second-level cache, then
one online-softmax step (https://arxiv.org/abs/2205.14135) for each (token, query head) row. A
row's arithmetic does not depend on the other rows, so neither chunking, batching nor the number
of threads changes a result.

Shape letters: T tokens, B sequences, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_kernels.attention.cpu_arguments import AttentionKernel, check_attention_arguments
from hal_kernels.attention.cpu_prefill_worker import compile_prefill
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_to_read, vector_to_read
from hal_kernels.cpu_simd import element_kind

if TYPE_CHECKING:
    from hal.ops.attention import AttentionMetadata

# Query rows of a tile: their vectors and sums stay in the second-level cache.
_TILE_ELEMENTS = 6144
_MAX_TILE_TOKENS = 32


def bind_attention_prefill(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    scale: float,
    kv_dtype: torch.dtype | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> AttentionKernel:
    """Bind causal attention of chunks with or without a cached prefix.

    As ``bind_attention_decode``, but a sequence has any number of query tokens: the kernel takes
    q [T, Hq*D] (rows may be strided) and reads ``query_start_loc`` of the metadata; it returns
    [T, Hq*D].

    Machine code: vfmadd231ps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    check_attention_arguments(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks)
    group = num_heads // num_kv_heads
    tile_tokens = max(1, min(_MAX_TILE_TOKENS, _TILE_ELEMENTS // (group * head_dim)))
    compiled = compile_prefill(
        num_kv_heads,
        group,
        head_dim,
        block_size,
        tile_tokens,
        element_kind(dtype),
        element_kind(kv_dtype or dtype),
        window,
        float(softcap),
        sinks is not None,
        float(scale),
    )
    sink_logits = 0 if sinks is None else sinks.detach().to(torch.float32).contiguous()
    launch = bind_worker(compiled, 10, (sink_logits,))
    out_features = num_heads * head_dim
    cache_dtype = kv_dtype or dtype

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        q = rows_to_read("q of attention", q, out_features, dtype)
        dense_in_place("k cache", k_cache, cache_dtype)
        dense_in_place("v cache", v_cache, cache_dtype)
        out = torch.empty(q.shape[0], out_features, dtype=dtype)
        starts = vector_to_read("query_start_loc", meta.query_start_loc, torch.int32)
        seq_lens = vector_to_read("seq_lens", meta.seq_lens, torch.int32)
        block_table = vector_to_read("block_table", meta.block_table, torch.int32)
        num_tiles = (meta.max_query_len + tile_tokens - 1) // tile_tokens
        launch(
            seq_lens.shape[0] * num_kv_heads * num_tiles,
            1,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            starts.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            num_tiles,
        )
        return out

    return kernel
