"""Binds the Triton indexer scores to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.attention import AttentionMetadata
from hal.ops.index_logits import IndexLogitsRequest
from hal.ops.kv_formats import KV_FORMATS, PLAIN_FORMATS
from hal_kernels.aot.targets import Target
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
from hal_kernels.index_top_k.wide_rows import rows_for_wide_loads
from hal_kernels.tuning.store import tuned_rows

IndexLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]

_LISTED = {"is_decode": True, "is_listed": True}  # one query a program


class LaunchScores(Protocol):
    """Launches the scores of one call; q, weights, key_cache and meta as in `bind`.

    out: float32 [T, width], whose columns stand for the entries from `offset` on or, with
    candidates int32 [T, blocks], for those of these blocks. What a query sees is written; is_whole:
    -inf in the rest as well.
    """

    def __call__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        *,
        offset: int = 0,
        candidates: torch.Tensor | None = None,
        is_whole: bool = False,
    ) -> None: ...


def bind(request: IndexLogitsRequest, device: DeviceSpec, *, scale: float) -> IndexLogits:
    """kernel(q[T, H*D], weights[T, H], key_cache, meta) -> float32 [T, max_seq_len // ratio].

    Rows of q that belong to no sequence keep whatever was in the memory of the result.
    """
    launch = bind_scores(request, device, scale=scale)

    def kernel(
        q: torch.Tensor, weights: torch.Tensor, key_cache: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor:
        width = meta.max_seq_len // request.compress_ratio
        out = rows_for_wide_loads(q.shape[0], width, q.device)
        launch(q, weights, key_cache, meta, out, is_whole=True)
        return out

    return kernel


def bind_scores(request: IndexLogitsRequest, device: DeviceSpec, *, scale: float) -> LaunchScores:
    """The scores of any part of the entries, in the caller's tensor."""
    kernel, constants, default, listed = _kernel_of(request, target_of(device))
    is_fp8 = request.dtype == "float8_e4m3fn"
    tuned = tuned_rows(shape_of(request, device), device)

    def launch(
        q: torch.Tensor,
        weights: torch.Tensor,
        key_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        *,
        offset: int = 0,
        candidates: torch.Tensor | None = None,
        is_whole: bool = False,
    ) -> None:
        options = listed if candidates is not None else tuned.choose(q.shape[0], default)
        grid = _grid(out.shape[1], meta, options)
        if not q.shape[0] or not min(grid):
            return
        rows, places = _layout(request, key_cache)
        blocks = out if candidates is None else candidates
        kernel[grid](
            q.view(torch.uint8) if is_fp8 else q, weights, *rows, out, blocks,
            meta.query_start_loc, meta.seq_lens, meta.block_table,
            scale, out.shape[1], offset, int(is_whole), q.stride(0), weights.stride(0),
            out.stride(0), blocks.stride(0), meta.block_table.stride(0), *places,
            IS_LISTED=candidates is not None, **constants, **options,
        )  # fmt: skip

    return launch


def _kernel_of(
    request: IndexLogitsRequest, target: Target
) -> tuple[Any, dict[str, Any], dict[str, int], dict[str, int]]:
    """The kernel of a request, its constants but for the tiles, its default tiles and those of
    queries with entries of their own."""
    is_fp8, is_decode = request.dtype == "float8_e4m3fn", request.phase == "decode"
    if _is_fp4(request):
        constants = fp4_constants(
            target, request.num_heads, request.block_size, request.compress_ratio
        )
        whole, listed = fp4_tiles(target, is_decode=is_decode), fp4_tiles(target, **_LISTED)
        return _index_logits_fp4_kernel, constants, chosen_tiles(whole), chosen_tiles(listed)
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
    whole, listed = tiles(target, is_decode=is_decode), tiles(target, **_LISTED)
    return _index_logits_kernel, constants, chosen_tiles(whole), chosen_tiles(listed)


def _is_fp4(request: IndexLogitsRequest) -> bool:
    """Whether the kernel of an FP8 query over keys of four bits is meant."""
    return request.dtype == "float8_e4m3fn" and request.key_format == "fp4_68"


def _grid(width: int, meta: AttentionMetadata, options: Mapping[str, int]) -> tuple[int, int, int]:
    """Tiles of entries, tiles of queries, sequences."""
    tiles_of_queries = -(-meta.max_query_len // options["BLOCK_Q"])
    return -(-width // options["BLOCK_N"]), tiles_of_queries, meta.seq_lens.shape[0]


def _layout(
    request: IndexLogitsRequest, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Keys with their scales where the kernel has them apart; strides of pages and rows, of pages
    of scales, and where scales begin."""
    if request.key_format in PLAIN_FORMATS:
        return (cache, cache), (cache.stride(0), cache.stride(1), 0, 0)
    form = KV_FORMATS[request.key_format]
    start = request.block_size * form.data_bytes
    if _is_fp4(request):
        return (cache,), (cache.stride(0), start)
    scales = cache.view(torch.float32) if form.scale == "float32" else cache
    start //= scales.element_size()
    return (cache, scales), (cache.stride(0), form.data_bytes, scales.stride(0), start)
