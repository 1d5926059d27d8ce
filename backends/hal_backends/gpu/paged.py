"""From a step's metadata to what attention libraries want: page lists, physical row numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from hal.ops.attention import AttentionMetadata
    from hal.ops.compressed_attention import CompressedAttentionMetadata


class Steps(Protocol):
    """What the metadata of every kind of attention says about a step's sequences."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


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


def sequence_of_tokens(meta: Steps, tokens: int) -> torch.Tensor:
    """int64 [T]: which sequence each row of q belongs to."""
    import torch

    rows = torch.arange(tokens, device=meta.query_start_loc.device)
    return torch.searchsorted(meta.query_start_loc[1:].long(), rows, right=True)


def positions_of_tokens(meta: Steps, tokens: int) -> torch.Tensor:
    """int64 [T]: the position of each row of q in its sequence."""
    import torch

    sequence = sequence_of_tokens(meta, tokens)
    rows = torch.arange(tokens, device=sequence.device)
    behind = meta.query_start_loc[1:].long()[sequence] - rows
    return meta.seq_lens.long()[sequence] - behind


def physical_rows(
    entries: torch.Tensor,
    meta: Steps,
    table: torch.Tensor,
    block_size: int,
    *,
    ratio: int = 1,
    is_causal: bool = True,
) -> torch.Tensor:
    """Entries [T, K] of each query's own sequence as rows of the cache, int32 [T, K].

    table: int32 [B, max_blocks]. ratio: tokens that an entry stands for. Negative entries become
    -1, and so do those that are not complete at the query, or in the sequence if not causal.
    """
    tokens = entries.shape[0]
    sequence = sequence_of_tokens(meta, tokens)
    seen = positions_of_tokens(meta, tokens) + 1 if is_causal else meta.seq_lens.long()[sequence]
    hidden = (entries < 0) | (entries >= (seen // ratio)[:, None])
    safe = entries.long().masked_fill(hidden, 0)
    blocks = table.long()[sequence].gather(1, safe // block_size)
    return (blocks * block_size + safe % block_size).masked_fill(hidden, -1).int()


def window_rows(
    meta: CompressedAttentionMetadata, tokens: int, window: int, block_size: int
) -> torch.Tensor:
    """Rows that each query sees in the window cache, newest first, -1 where none: [T, window]."""
    import torch

    at = positions_of_tokens(meta, tokens)
    entries = at[:, None] - torch.arange(window, device=at.device)
    return physical_rows(entries, meta, meta.window_block_table, block_size)
