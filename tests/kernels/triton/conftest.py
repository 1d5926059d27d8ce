"""Triton kernels run here in its interpreter, which is made to round as hardware does.

Memory that a launcher asks for without filling it holds what no result may hold: NaN, and large
integers. An element that a kernel leaves unwritten then fails whichever test looks at it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from faithful_interpreter import install

install()


def poison_byte(dtype: torch.dtype) -> int:
    """Of which every byte is, so that a float is NaN, and an integer large (and no -1, which lists
    have for padding)."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point:  # all bits set is NaN in each of them but these
        return 0x80 if str(dtype).endswith("fnuz") else 0xFF
    return 0x7F if dtype.is_signed else 0xFF


def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, whose memory is poisoned before it is handed out: by no op of torch, which a test
    may count."""

    def allocate_poisoned(*arguments: Any, **options: Any) -> torch.Tensor:
        memory = allocate(*arguments, **options)
        if memory.device.type == "cpu" and memory.numel():
            storage = memory.untyped_storage()
            ctypes.memset(storage.data_ptr(), poison_byte(memory.dtype), storage.nbytes())
        return memory

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without a value in it holds none: see the head of this file."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoning(getattr(torch.Tensor, name)))
