"""From a step's metadata to what attention libraries want: page lists, physical row numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hal.ops.attention import AttentionMetadata


def page_lists(
    meta: AttentionMetadata, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr int32 [B+1], indices int32 [pages], last_page_len int32 [B]) of the block table."""
    import torch

    pages = (meta.seq_lens + block_size - 1) // block_size
    indptr = torch.zeros(pages.shape[0] + 1, dtype=torch.int32, device=pages.device)
    indptr[1:] = pages.cumsum(0)
    columns = torch.arange(meta.block_table.shape[1], device=pages.device)
    indices = meta.block_table[columns[None, :] < pages[:, None]]
    last = meta.seq_lens - (pages - 1).clamp(min=0) * block_size
    return indptr, indices.int(), last.int()


def sequence_of_tokens(meta: AttentionMetadata, tokens: int) -> torch.Tensor:
    """int64 [T]: which sequence each row of q belongs to."""
    import torch

    rows = torch.arange(tokens, device=meta.query_start_loc.device)
    return torch.searchsorted(meta.query_start_loc[1:].long(), rows, right=True)


def positions_of_tokens(meta: AttentionMetadata, tokens: int) -> torch.Tensor:
    """int64 [T]: the position of each row of q in its sequence."""
    import torch

    sequence = sequence_of_tokens(meta, tokens)
    rows = torch.arange(tokens, device=sequence.device)
    behind = meta.query_start_loc[1:].long()[sequence] - rows
    return meta.seq_lens.long()[sequence] - behind


def physical_rows(
    positions: torch.Tensor, meta: AttentionMetadata, block_size: int
) -> torch.Tensor:
    """Positions [T, K] in their sequence, padded with -1, as rows of the cache, int32 [T, K]."""
    table = meta.block_table.long()[sequence_of_tokens(meta, positions.shape[0])]
    safe = positions.long().clamp(min=0)
    blocks = table.gather(1, safe // block_size)
    rows = blocks * block_size + safe % block_size
    return rows.masked_fill(positions < 0, -1).int()
