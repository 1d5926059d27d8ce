"""What the CPU's attention kernels are bound with: what they take, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hal_kernels.cpu_simd import LANES

if TYPE_CHECKING:
    from hal.ops.attention import AttentionMetadata

AttentionKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "AttentionMetadata"], torch.Tensor
]


def check_attention_arguments(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Refuse what the CPU attention kernels do not support.

    Raises:
        ValueError: says what was required and what was found.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"attention needs num_heads divisible by num_kv_heads, got {num_heads} "
            f"and {num_kv_heads}"
        )
    if head_dim < LANES or head_dim > 512 or head_dim % LANES:
        raise ValueError(
            f"CPU attention needs head_dim a multiple of {LANES} up to 512, got {head_dim}"
        )
    if block_size < LANES or block_size % LANES:
        raise ValueError(f"CPU attention needs block_size a multiple of {LANES}, got {block_size}")
    if window < 0 or softcap < 0:
        raise ValueError(f"window and softcap cannot be negative, got {window} and {softcap}")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(f"sinks need shape ({num_heads},), got {tuple(sinks.shape)}")
