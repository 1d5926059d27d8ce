"""The memory that tests of kernels hand out is poisoned: without it an unwritten element passes."""

from __future__ import annotations

import pytest
import torch

FLOATS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_no_numbers(dtype: torch.dtype) -> None:
    given = torch.zeros(3, dtype=dtype)
    for memory in (
        torch.empty((2, 3), dtype=dtype),
        torch.empty_like(given),
        torch.empty_strided((2, 2), (4, 1), dtype=dtype),
        given.new_empty(5),
        given.new_empty_strided((2, 2), (2, 1)),
    ):
        assert memory.float().isnan().all()
    assert not given.view(torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_are_large(dtype: torch.dtype) -> None:
    assert (torch.empty(4, dtype=dtype).double() > 2.0 ** (dtype.itemsize * 8 - 2)).all()
    assert torch.empty(0, dtype=dtype).shape == (0,)
