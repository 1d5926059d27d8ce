"""Four-bit weights of GPTQ, AWQ and compressed-tensors, packed here bit by bit, and unpacked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.gemm.packed_int4 import (
    int4_from_awq,
    int4_from_compressed_tensors,
    int4_from_gptq,
)

_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(values: np.ndarray, order: list[int] | None = None) -> torch.Tensor:
    """int32 [R, C/8] of 0..15 [R, C], by additions: nibble i is the value at order[i] of eight."""
    rows, columns = values.shape
    out = np.zeros((rows, columns // 8), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            place = column % 8 if order is None else order.index(column % 8)
            out[row, column // 8] += np.uint32(int(values[row, column]) * 16**place)
    return torch.from_numpy(out.view(np.int32).copy())


class Drawn:
    """A weight [n, k]: values [n, k], zeros and scales [n, k / group], and what they mean."""

    def __init__(self, n: int, k: int, group: int, *, lowest_zero: int = 0) -> None:
        draw = np.random.default_rng()
        self.q = draw.integers(0, 16, (n, k))
        self.zero = draw.integers(lowest_zero, 16, (n, k // group))
        self.scale = torch.rand(n, k // group).half() * 0.1 + 0.001
        wide = np.repeat(self.zero, group, axis=1)
        scale = np.repeat(self.scale.double().numpy(), group, axis=1)
        self.exact = torch.from_numpy((self.q - wide) * scale)


def assert_holds(weight: QuantizedWeight, exact: torch.Tensor, name: str) -> None:
    assert weight.format.name == name
    assert torch.equal(weight.dequantize().double(), exact)


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("is_first", [True, False], ids=["gptq", "gptq_v2"])
def test_gptq(group: int, is_first: bool) -> None:
    one = Drawn(24, 384, group, lowest_zero=int(is_first))
    weight = int4_from_gptq(
        packed(one.q).T.contiguous(),
        packed((one.zero - is_first).T),
        one.scale.T.contiguous(),
        g_idx=torch.arange(384, dtype=torch.int32) // group,
        stores_zeros_minus_one=is_first,
    )
    assert_holds(weight, one.exact, f"int4_g{group}_zero")


@pytest.mark.parametrize("group", [64, 128])
def test_awq(group: int) -> None:
    one = Drawn(24, 256, group)
    weight = int4_from_awq(
        packed(one.q.T, _AWQ), packed(one.zero.T, _AWQ), one.scale.T.contiguous()
    )
    assert_holds(weight, one.exact, f"int4_g{group}_zero")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_compressed_tensors_without_zeros(group: int, dtype: torch.dtype) -> None:
    one = Drawn(20, 256, group)
    scale = one.scale.to(dtype)
    exact = (one.q - 8) * np.repeat(scale.double().numpy(), group, axis=1)
    weight = int4_from_compressed_tensors(packed(one.q), scale)
    assert weight.scale.dtype == torch.float16
    assert_holds(weight, torch.from_numpy(exact), f"int4_g{group}")


def test_compressed_tensors_with_zeros_of_a_filled_word() -> None:
    one = Drawn(20, 256, 128)
    filled = np.concatenate((one.zero, np.zeros((4, 2), dtype=int)))
    weight = int4_from_compressed_tensors(packed(one.q), one.scale, packed(filled.T).T.contiguous())
    assert_holds(weight, one.exact, "int4_g128_zero")


def test_zeros_of_eight_are_symmetric() -> None:
    one = Drawn(8, 256, 128)
    eights = packed(np.full((2, 8), 7))
    weight = int4_from_gptq(packed(one.q).T.contiguous(), eights, one.scale.T.contiguous())
    assert weight.minimum is None
    assert weight.format.name == "int4_g128"


def test_groups_of_32_keep_a_minimum_where_float16_holds_it() -> None:
    one = Drawn(8, 64, 32)
    rounded = (one.scale * 0 + 0.0625).half()  # a power of two: its product with a zero is exact
    weight = int4_from_awq(packed(one.q.T, _AWQ), packed(one.zero.T, _AWQ), rounded.T.contiguous())
    exact = (one.q - np.repeat(one.zero, 32, axis=1)) * 0.0625
    assert_holds(weight, torch.from_numpy(exact), "int4_g32_asym")
    odd = torch.full_like(rounded, 0.1)
    zeros = packed(np.full((8, 2), 13).T, _AWQ)
    with pytest.raises(ValueError, match="groups of 64 or 128"):
        int4_from_awq(packed(one.q.T, _AWQ), zeros, odd.T.contiguous())


def test_what_would_lose_something_is_refused() -> None:
    one = Drawn(8, 256, 128)
    words, zeros = packed(one.q).T.contiguous(), packed(np.full((2, 8), 6))
    scale = one.scale.T.contiguous()
    with pytest.raises(ValueError, match="desc_act"):
        int4_from_gptq(words, zeros, scale, g_idx=torch.arange(256).flip(0) // 128)
    with pytest.raises(ValueError, match="found 0 or 16"):
        int4_from_gptq(words, packed(np.full((2, 8), 15)), scale)
    with pytest.raises(ValueError, match="float16 holds exactly"):
        int4_from_gptq(words, zeros, (scale.float() * 1e-6).bfloat16())
    with pytest.raises(ValueError, match="groups of 32, 64 or 128"):
        int4_from_gptq(words, zeros, scale[:1])
    with pytest.raises(ValueError, match="eight values in an int32"):
        int4_from_gptq(words.long(), zeros, scale)
    with pytest.raises(ValueError, match=r"required zero points \[8, 2\]"):
        int4_from_gptq(words, zeros[:1], scale)
