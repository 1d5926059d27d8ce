"""Binds the Triton compression of blocks to requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hal.device import DeviceSpec
from hal.ops.formats import torch_dtype
from hal.ops.nsa_attention import NsaMetadata
from hal.ops.nsa_compress import NsaCompressRequest, NsaCompressWeights
from hal_kernels.gemm.triton import target_of
from hal_kernels.nsa_compress.triton_kernels import _nsa_hidden_kernel, _nsa_project_kernel
from hal_kernels.nsa_compress.triton_variants import form_of, items_at_once, product_tiles

NsaCompress = Callable[[torch.Tensor, torch.Tensor, NsaMetadata], None]


def bind(
    request: NsaCompressRequest, device: DeviceSpec, *, weights: NsaCompressWeights
) -> NsaCompress:
    """kernel(rows[N, P, Hk, D], entries[N', P, Hk, D], meta), which writes the entries that the
    new tokens complete.

    The weights are read when they are bound: both products take them in the request's dtype, and
    w1 @ position, the same for every block, is added to b1 in float64. Hidden values of what a step
    may complete (each sequence as much as the one with the most new tokens) lie in a workspace of
    at most MOST_HIDDEN_BYTES, for which the launches are repeated. They have the request's dtype:
    of float16 those beyond 65,504 are infinite, as in a torch module of it, and make their entry
    infinite or NaN. Raises ValueError for weights or caches of other shapes than the request's, and
    for caches of another dtype.
    """
    weights.check(request)
    dtype = torch_dtype(request.dtype)
    w1, w2 = (w.to(dtype).contiguous() for w in (weights.w1, weights.w2))
    b1, b2 = _first_bias(weights), _second_bias(weights)
    hidden_size, dim = request.hidden_size, request.head_dim
    constants = {
        "KV_HEADS": request.num_kv_heads,
        "HEAD_DIM": dim,
        "LENGTH": request.compress_length,
        "STRIDE": request.compress_stride,
        "PAGE": request.block_size,
    }
    target, form = target_of(device), form_of(request.phase)
    first, second = (product_tiles(target, form, kernel) for kernel in ("hidden", "project"))
    at_once = items_at_once(hidden_size, first)
    tiles_h, tiles_d = -(-hidden_size // first["BLOCK_H"]), -(-dim // second["BLOCK_D"])

    def kernel(rows: torch.Tensor, entries: torch.Tensor, meta: NsaMetadata) -> None:
        _check_cache(request, "rows", rows)
        _check_cache(request, "entries", entries)
        most = request.most_entries(meta.max_query_len)
        items = meta.seq_lens.shape[0] * most * request.num_kv_heads
        hidden = torch.empty((min(items, at_once), hidden_size), dtype=dtype, device=rows.device)
        which = (meta.query_start_loc, meta.seq_lens)
        table, entry_table = meta.block_table, meta.entry_block_table
        for start in range(0, items, at_once):
            sizes = (start, items, most, hidden_size)
            tiles = -(-min(items - start, at_once) // first["BLOCK_I"])
            _nsa_hidden_kernel[(tiles, tiles_h)](
                rows, w1, b1, hidden, *which, table, *sizes, table.stride(0), *rows.stride()[:3],
                **constants, **first,
            )  # fmt: skip
            _nsa_project_kernel[(tiles, tiles_d)](
                hidden, w2, b2, entries, *which, entry_table, *sizes, entry_table.stride(0),
                *entries.stride()[:3], **constants, **second,
            )  # fmt: skip

    return kernel


def _first_bias(weights: NsaCompressWeights) -> torch.Tensor:
    """float32 [hidden_size]: b1 and what the position encoding adds to the hidden values."""
    added = weights.w1.double() @ weights.position.double().flatten()
    return (added if weights.b1 is None else added + weights.b1.double()).float()


def _second_bias(weights: NsaCompressWeights) -> torch.Tensor:
    """float32 [head_dim]."""
    if weights.b2 is None:
        return torch.zeros(weights.w2.shape[0], dtype=torch.float32, device=weights.w2.device)
    return weights.b2.float().contiguous()


def _check_cache(request: NsaCompressRequest, name: str, cache: torch.Tensor) -> None:
    want = (request.block_size, request.num_kv_heads, request.head_dim)
    if cache.dim() != 4 or cache.shape[1:] != want or cache.stride(3) != 1:
        raise ValueError(
            f"nsa_compress: required {name} [blocks, {', '.join(map(str, want))}] whose values lie "
            f"side by side, found {list(cache.shape)} of strides {list(cache.stride())}; pass the "
            f"cache that the request describes"
        )
    if cache.dtype != torch_dtype(request.dtype):
        found = str(cache.dtype).removeprefix("torch.")
        raise ValueError(
            f"nsa_compress: required {name} in {request.dtype}, found {found}; pass a cache of "
            f"that dtype, or bind a request of the cache's"
        )
