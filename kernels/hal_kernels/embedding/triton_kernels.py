"""Embedding gather in Triton. Suffixes of tensor names: T tokens, V vocabulary, H hidden size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _embedding_kernel(ids_T_ptr, weight_VH_ptr, y_TH_ptr, H, BLOCK_H: tl.constexpr):
    """Program (token, block of BLOCK_H columns)."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = offs < H
    row = tl.load(ids_T_ptr + token).to(tl.int64)
    values = tl.load(weight_VH_ptr + row * H + offs, mask=inside, other=0.0)
    tl.store(y_TH_ptr + token * H + offs, values, mask=inside)
