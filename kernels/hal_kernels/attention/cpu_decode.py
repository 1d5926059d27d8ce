"""Decode attention on the CPU: one query token a sequence, over the paged KV cache in place.

The work is cut into (sequence, kv head, split of 128 keys). An item reads its keys and values
once for the whole group of query heads and leaves the split's softmax maximum, sum and weighted
values; the last item of a (sequence, kv head) to finish joins the splits in their order. Splits
sit at fixed positions, so a sequence's result does not depend on the other sequences, on the
number of threads or on their timing.

Shape letters: B sequences, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hal_kernels.attention.cpu_arguments import AttentionKernel, check_attention_arguments
from hal_kernels.attention.cpu_decode_worker import SPLIT_KEYS, compile_decode
from hal_kernels.cpu_launch import bind_worker
from hal_kernels.cpu_operands import dense_in_place, rows_to_read, vector_to_read
from hal_kernels.cpu_recording import hold
from hal_kernels.cpu_simd import LANES, element_kind

if TYPE_CHECKING:
    from hal.ops.attention import AttentionMetadata

# Below this many (key, query head) pairs a call stays on the calling thread: waking the team
# costs about 3 µs.
_PARALLEL_PAIRS = 1024


def bind_attention_decode(
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
    """Bind decode attention.

    The kernel takes q [B, Hq*D] (rows may be strided), k_cache and v_cache
    [num_blocks, block_size, Hkv, D] and the metadata of hal.ops.attention (``query_start_loc`` is
    not read: one query a sequence), and returns [B, Hq*D]. float32 or bfloat16, q and cache
    independently; sums are float32. window: keys seen including the query's own, 0 for all.
    softcap: c of c*tanh(s/c), 0 for none. sinks: [Hq] extra logits of the softmax's denominator.

    Machine code: vfmadd231ps on zmm (AVX-512) or ymm (AVX2).

    Raises:
        ValueError: a static argument the kernel does not support.
    """
    check_attention_arguments(num_heads, num_kv_heads, head_dim, block_size, window, softcap, sinks)
    group = num_heads // num_kv_heads
    compiled = compile_decode(
        num_kv_heads,
        group,
        head_dim,
        block_size,
        element_kind(dtype),
        element_kind(kv_dtype or dtype),
        window,
        float(softcap),
        sinks is not None,
        float(scale),
    )
    sink_logits = 0 if sinks is None else sinks.detach().to(torch.float32).contiguous()
    launch = bind_worker(compiled, 12, (sink_logits,), addresses=(0, 2, 3, 4, 5, 6, 8, 9))
    partial_floats = num_kv_heads * group * (head_dim + LANES)
    window_splits = (window + SPLIT_KEYS - 2) // SPLIT_KEYS + 1 if window else 0
    out_features = num_heads * head_dim
    cache_dtype = kv_dtype or dtype
    arrivals = _zeros(0)

    def kernel(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        nonlocal arrivals
        q = rows_to_read("q of attention", q, out_features, dtype)
        dense_in_place("k cache", k_cache, cache_dtype)
        dense_in_place("v cache", v_cache, cache_dtype)
        batch = q.shape[0]
        out = torch.empty(batch, out_features, dtype=dtype)
        num_splits = (meta.max_seq_len + SPLIT_KEYS - 1) // SPLIT_KEYS
        if window_splits and window_splits < num_splits:
            num_splits = window_splits
        # Made for each call: kept, those of all layers would add up to hundreds of MiB.
        partials = torch.empty(batch * num_splits * partial_floats, dtype=torch.float32)
        if arrivals.numel() < batch * num_kv_heads:
            arrivals = _zeros(batch * num_kv_heads)
        hold(arrivals)
        num_items = batch * num_kv_heads * num_splits
        is_small = batch * meta.max_seq_len * num_heads < _PARALLEL_PAIRS
        seq_lens = vector_to_read("seq_lens", meta.seq_lens, torch.int32)
        block_table = vector_to_read("block_table", meta.block_table, torch.int32)
        launch(
            num_items,
            num_items if is_small else 1,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            out.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            partials.data_ptr(),
            arrivals.data_ptr(),
            num_splits,
            batch,
        )
        return out

    return kernel


def _zeros(count: int) -> torch.Tensor:
    """int64 [count], by no op of torch: a step that is captured has launches only."""
    return torch.from_numpy(np.zeros(count, dtype=np.int64))
