"""Tensors that machine code reads by address: what it takes for granted is made so, or refused.

A compiled kernel knows nothing of torch's shapes: a tensor of another dtype, width or layout would
be read as if it had its own. What is only read may be copied into the layout that is wanted; what
is written in place may not.
"""

from __future__ import annotations

import torch


def rows_to_read(name: str, x: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor:
    """`x` [T, features] with adjacent columns; rows may lie apart. Copied where columns are not
    adjacent. Raises ValueError for another width or dtype."""
    if x.shape[-1] != features or x.dtype is not dtype:
        raise _unfit(name, f"[T, {features}] of {dtype}", x)
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_in_place(name: str, x: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor:
    """`x` [T, features], which is written to. Raises ValueError for another width or dtype, and
    where columns are not adjacent."""
    if x.shape[-1] != features or x.dtype is not dtype or x.stride(-1) != 1:
        raise _unfit(name, f"[T, {features}] of {dtype} with adjacent columns", x)
    return x


def dense_in_place(
    name: str, x: torch.Tensor, dtype: torch.dtype, shape: torch.Size | None = None
) -> torch.Tensor:
    """`x`, which is written to, or too large to copy. Raises ValueError if it has gaps, or not the
    shape."""
    if x.dtype is not dtype or not x.is_contiguous() or (shape is not None and x.shape != shape):
        what = "a contiguous tensor" if shape is None else f"{list(shape)} without gaps"
        raise _unfit(name, f"{what} of {dtype}", x)
    return x


def vector_to_read(name: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` of any shape, contiguous. Raises ValueError for another dtype."""
    if x.dtype is not dtype:
        raise _unfit(name, f"a tensor of {dtype}", x)
    return x.contiguous()


def _unfit(name: str, required: str, x: torch.Tensor) -> ValueError:
    return ValueError(
        f"{name}: required {required}, found {list(x.shape)} of {x.dtype} with strides "
        f"{list(x.stride())}"
    )
