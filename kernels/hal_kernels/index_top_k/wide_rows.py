"""How far rows of scores may be loaded: wide loads end at multiples of their width only.

Free of triton.
"""

from __future__ import annotations

import torch

WIDE_COLUMNS = 16  # what Triton knows an argument as a multiple of


def rows_for_wide_loads(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, columns] to be filled, whose memory goes on to the next multiple of
    `WIDE_COLUMNS` of each row, so that `readable_columns` are that many."""
    held = -(-columns // WIDE_COLUMNS) * WIDE_COLUMNS
    return torch.empty((rows, held), dtype=torch.float32, device=device)[:, :columns]


def readable_columns(scores: torch.Tensor) -> int:
    """How many columns from the first on may be loaded of each row of float32 [rows, columns]: up
    to the next multiple of `WIDE_COLUMNS` where rows begin at such a one and the memory goes on so
    far, so that a thread loads 16 bytes at once; else those that there are."""
    rows, columns = scores.shape
    held = -(-columns // WIDE_COLUMNS) * WIDE_COLUMNS
    stride = scores.stride(0)
    behind = scores.storage_offset() + max(0, rows - 1) * stride + held
    is_held = behind * scores.element_size() <= scores.untyped_storage().nbytes()
    return held if stride % WIDE_COLUMNS == 0 and is_held else columns
