"""Four-bit weights of GPTQ, AWQ and compressed-tensors, packed here bit by bit, and unpacked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hal.ops.formats import QuantizedWeight
from hal_kernels.gemm.packed_int4 import (
    int4_from_awq,
    int4_from_compressed_tensors,
    int4_from_gptq,
)

# AWQ's kernel takes two halves of a word at once (mask 0x000f000f): nibbles i and i + 4 are columns
# 2 i and 2 i + 1.
_AWQ = sorted(range(8), key=lambda column: column // 2 + 4 * (column % 2))


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
    in_order = torch.arange(256) // group
    for index in (None, in_order.int(), torch.full((256,), -1)):
        weight = int4_from_compressed_tensors(
            packed(one.q), scale, weight_shape=torch.tensor([20, 256]), weight_g_idx=index
        )
        assert weight.scale.dtype == torch.float16
        assert_holds(weight, torch.from_numpy(exact), f"int4_g{group}")


def test_compressed_tensors_with_zeros_of_a_filled_word() -> None:
    one = Drawn(20, 256, 128)
    filled = np.concatenate((one.zero, np.zeros((4, 2), dtype=int)))
    zeros = packed(filled.T).T.contiguous()
    weight = int4_from_compressed_tensors(packed(one.q), one.scale, zeros, weight_shape=(20, 256))
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


def test_eight_bits_and_groups_out_of_order_are_no_weight_of_compressed_tensors() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (8, 32), dtype=torch.int32)
    with pytest.raises(ValueError, match="shape or number of bits"):  # K of 128, groups of 32
        int4_from_compressed_tensors(words, torch.rand(8, 4).half(), weight_shape=(8, 128))
    scale = torch.rand(8, 4).half()
    mixed = torch.randperm(256) // 64
    with pytest.raises(ValueError, match="actorder"):
        int4_from_compressed_tensors(words, scale, weight_shape=(8, 256), weight_g_idx=mixed)
    zeros = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"required weight_zero_point \[1, 4\]"):
        int4_from_compressed_tensors(words, scale, zeros, weight_shape=(8, 256))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("make", [int4_from_gptq, int4_from_awq])
def test_vectors_are_refused(make: Callable[..., QuantizedWeight], which: int) -> None:
    shapes = {int4_from_gptq: [(16, 8), (2, 1)], int4_from_awq: [(128, 1), (2, 1)]}[make]
    tensors = [torch.zeros(shape, dtype=torch.int32) for shape in shapes] + [torch.ones(2, 8)]
    assert make(*tensors).shape == (8, 128)
    tensors[which] = tensors[which].flatten()
    with pytest.raises(ValueError, match="matrix"):
        make(*tensors)


def test_a_vector_of_scales_is_refused() -> None:
    words = torch.zeros(8, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="matrix"):
        int4_from_compressed_tensors(words, torch.ones(8), weight_shape=(8, 128))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_are_finite_numbers(value: float) -> None:
    words, scale = torch.zeros(8, 16, dtype=torch.int32), torch.ones(8, 2)
    scale[3, 1] = value
    with pytest.raises(ValueError, match="finite scales"):
        int4_from_compressed_tensors(words, scale.half(), weight_shape=(8, 128))
    whole = torch.ones(8, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="float16, bfloat16 or float32"):
        int4_from_compressed_tensors(words, whole, weight_shape=(8, 128))
