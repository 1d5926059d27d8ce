"""Binds the Triton attention over listed blocks to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.block_sparse_attention import BlockSparseAttentionRequest, BlockSparseMetadata
from hal_kernels.block_sparse_attention.grouped_rows import LOG2_E
from hal_kernels.block_sparse_attention.triton_kernels import _block_sparse_attention_kernel
from hal_kernels.block_sparse_attention.triton_tuning import shape_of
from hal_kernels.block_sparse_attention.triton_variants import tiles
from hal_kernels.gemm.triton import target_of
from hal_kernels.tuning.store import tuned_rows


def bind(
    request: BlockSparseAttentionRequest, device: DeviceSpec, *, scale: float
) -> Callable[..., torch.Tensor]:
    """kernel(q[T, H*D], k_cache[N, P, K, D], v_cache[N, P, K, DV], lists[L, K, S], meta) ->
    out[T, H*DV].

    Rows of q that belong to no sequence keep whatever was in the memory of the result.
    """
    heads, kv_heads = request.num_heads, request.num_kv_heads
    block_d, block_dv = (
        max(16, triton.next_power_of_2(dim)) for dim in (request.head_dim, request.v_head_dim)
    )
    default = tiles(
        target_of(device),
        max(block_d, block_dv),
        heads // kv_heads,
        query_block=request.query_block,
        key_block=request.key_block,
    )
    constants = {
        "GROUP": heads // kv_heads,
        "QUERY_BLOCK": request.query_block,
        "KEY_BLOCK": request.key_block,
        "PLACES": request.num_selected,
        "BLOCK_S": triton.next_power_of_2(request.num_selected),
        "HEAD_DIM": request.head_dim,
        "V_HEAD_DIM": request.v_head_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "PAGE": request.block_size,
    }
    tuned = tuned_rows(shape_of(request, device), device)

    def kernel(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        lists: torch.Tensor,
        meta: BlockSparseMetadata,
    ) -> torch.Tensor:
        if lists.shape[1:] != (kv_heads, request.num_selected):
            raise ValueError(
                f"block_sparse_attention: required lists [L, {kv_heads}, {request.num_selected}], "
                f"found {list(lists.shape)}"
            )
        out = q.new_empty((q.shape[0], heads * request.v_head_dim))
        options = tuned.choose(q.shape[0], default)
        grid = (-(-meta.max_query_len // options["BLOCK_Q"]), kv_heads, meta.seq_lens.shape[0])
        if q.shape[0] and min(grid):
            _block_sparse_attention_kernel[grid](
                q, k_cache, v_cache, lists.contiguous(), out,
                meta.query_start_loc, meta.seq_lens, meta.block_table, meta.list_start_loc,
                scale * LOG2_E, request.window, kv_heads,
                q.stride(0), out.stride(0), meta.block_table.stride(0),
                *k_cache.stride()[:3], *v_cache.stride()[:3], **constants, **options,
            )  # fmt: skip
        return out

    return kernel
