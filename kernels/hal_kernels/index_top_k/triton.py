"""Binds the Triton choice of entries to requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from hal.device import DeviceSpec
from hal.ops.index_top_k import CANDIDATE_BLOCK_ENTRIES, IndexTopKRequest
from hal_kernels.index_top_k.triton_kernels import _block_maxima_kernel, _index_top_k_kernel
from hal_kernels.index_top_k.triton_variants import PROGRAM_BLOCKS, tiles
from hal_kernels.index_top_k.wide_rows import readable_columns, rows_for_wide_loads

_UNLIMITED = 2**31 - 1


def bind(request: IndexTopKRequest, device: DeviceSpec) -> Callable[..., Any]:
    """kernel(logits float32 [T, entries], visible int32 [T], candidates=None) -> int32 [T, width],
    with int32 [T, candidate_blocks] where the request publishes them. Lists are by rising index,
    with candidates by theirs; these name no block twice.
    """
    is_limited = request.candidate_blocks > 0 and not request.publishes_candidates
    choose = bind_radix(
        request.top_k, request.pool_size, request.candidate_blocks if is_limited else 0
    )
    choose_blocks = bind_radix(max(1, request.candidate_blocks), 1, 0)

    def kernel(
        logits: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None = None
    ) -> Any:
        if (candidates is not None) != is_limited:
            raise ValueError(
                f"index_top_k: required {'' if is_limited else 'no '}candidates, "
                f"found {'none' if candidates is None else list(candidates.shape)}"
            )
        indices = choose(logits, visible, candidates)
        if not request.publishes_candidates:
            return indices
        return indices, choose_blocks(*_block_maxima(logits, visible), None)

    return kernel


def bind_radix(
    top_k: int, pool_size: int, candidates: int, *, is_by_place: bool = False
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """kernel(logits, visible, candidates) -> int32 [T, top_k + pool_size - 1]. is_by_place: the
    logits are those of the candidate blocks alone, in the order of the list."""
    constants = {
        "TOP_K": top_k,
        "POOL": pool_size,
        "BLOCK_P": triton.next_power_of_2(pool_size),
        "CANDIDATES": candidates,
        "BY_PLACE": is_by_place,
        **tiles(pool_size),
    }

    def kernel(
        logits: torch.Tensor, visible: torch.Tensor, candidates: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, entries = logits.shape
        if is_by_place:
            entries = _UNLIMITED  # of the context; what a query sees is less
        width = top_k + pool_size - 1
        out = torch.empty((tokens, width), dtype=torch.int32, device=logits.device)
        if tokens:
            blocks = out if candidates is None else candidates
            _index_top_k_kernel[(tokens,)](
                logits, visible, blocks, out,
                entries, readable_columns(logits), logits.stride(0), blocks.stride(0),
                out.stride(0), **constants,
            )  # fmt: skip
        return out

    return kernel


def _block_maxima(logits: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score of each block, and the blocks that each query sees."""
    tokens, entries = logits.shape
    blocks = -(-entries // CANDIDATE_BLOCK_ENTRIES)
    maxima = rows_for_wide_loads(tokens, blocks, logits.device)
    counts = torch.empty((tokens,), dtype=torch.int32, device=logits.device)
    if tokens and blocks:
        _block_maxima_kernel[(tokens, -(-blocks // PROGRAM_BLOCKS))](
            logits, visible, maxima, counts, blocks, readable_columns(logits), logits.stride(0),
            maxima.stride(0), BLOCK_N=PROGRAM_BLOCKS,
        )  # fmt: skip
    else:
        counts.zero_()
    return maxima, counts
