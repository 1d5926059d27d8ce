"""FP8 and FP4 weights: stored values against transformers and gguf, products against float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from gguf import GGMLQuantizationType, quants
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hal.ops import CATALOGUE
from hal.ops.formats import FORMATS, QuantizedWeight, WeightFormat, quantize_weight
from hal.ops.gemm import GemmRequest, GroupedGemmRequest
from hal.ops.low_precision import LARGEST, quantize_groups, round_activations
from hal.roofline import needed_work
from op_inputs import normal

BLOCKS = {name: f for name, f in FORMATS.items() if f.element != "int"}
STORAGE = [name for name, f in BLOCKS.items() if f.activation == "float"]


def values_one_by_one(weight: QuantizedWeight) -> torch.Tensor:
    """The stored values in float32, element by element, through torch's own 8-bit types."""
    fmt, (n, k) = weight.format, weight.shape
    codes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    out = torch.empty(n, k)
    scale = weight.scale
    if fmt.scale_dtype == "ue8m0":
        scale = scale.view(torch.float8_e8m0fnu)
    for row in range(n):
        for column in range(k):
            if fmt.bits == 4:
                byte = int(weight.data[row, column // 2])
                code = byte >> 4 if column % 2 else byte & 15
                value = -codes[code - 8] if code > 7 else codes[code]
            else:
                value = float(weight.data[row, column])
            at: Any = row
            if fmt.group_size:
                at = (row // fmt.block_n, column // fmt.group_size)
            out[row, column] = torch.tensor(value) * scale[at].float()
    return out


def some_weight(rng: torch.Generator, fmt: WeightFormat, n: int, k: int) -> QuantizedWeight:
    return quantize_weight(normal(rng, n, k, dtype="float32") * 0.05, fmt)


def nbytes(weight: QuantizedWeight) -> int:
    return weight.data.nbytes + weight.scale.nbytes


@pytest.mark.parametrize("name", STORAGE)
@pytest.mark.parametrize("shape", [(256, 256), (128, 384)], ids=str)
def test_stored_values_are_those_of_transformers(
    rng: torch.Generator, name: str, shape: tuple[int, int]
) -> None:
    weight = some_weight(rng, FORMATS[name], *shape)
    data = weight.data.view(torch.int8) if weight.format.bits == 4 else weight.data
    scale = weight.scale if weight.format.group_size else weight.scale[:, None]
    want = Fp8Dequantize(None)._dequantize_one(data, scale, torch.float32)
    assert torch.equal(weight.dequantize(), want)
    assert weight.shape == shape
    assert nbytes(weight) == FORMATS[name].weight_bytes(*shape)


@pytest.mark.parametrize("name", STORAGE)
def test_blocks_at_the_edge_may_be_cut(rng: torch.Generator, name: str) -> None:
    fmt = FORMATS[name]
    n, k = (130, 160) if fmt.block_n > 1 else (6, 96)
    weight = some_weight(rng, fmt, n, k)
    assert torch.equal(weight.dequantize(), values_one_by_one(weight))
    assert nbytes(weight) == fmt.weight_bytes(n, k)
    assert weight.scale.shape == fmt.scale_shape(n, k)


@pytest.mark.parametrize("name", STORAGE)
def test_quantising_a_weight_uses_the_whole_range(rng: torch.Generator, name: str) -> None:
    """Of each block the largest value is within a step of the largest code, none saturates far."""
    fmt = FORMATS[name]
    dense = normal(rng, 96, 192, dtype="float32")
    dense[:, 64:] *= 20.0
    dense[64:] = 0.0
    back = quantize_weight(dense, fmt).dequantize()
    assert torch.equal(back[64:], torch.zeros(32, 192))
    step = {"fp8_e4m3fn": 2.0**-4, "fp4_e2m1": 2.0**-2}[fmt.element]
    columns, rows = fmt.group_size or 192, fmt.block_n
    for r in range(0, 96, rows):
        for c in range(0, 192, columns):
            block = (slice(r, r + rows), slice(c, c + columns))
            peak = dense[block].abs().max()
            # Half a step at the top, with a scale up to twice too large, or an e4m3 scale rounded.
            assert (back[block] - dense[block]).abs().max() <= 2 * step * peak


def test_mxfp4_and_nvfp4_hold_the_values_of_gguf(rng: torch.Generator) -> None:
    n, k = 6, 128
    codes = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    data = codes[:, 0::2] | (codes[:, 1::2] << 4)
    exponents = torch.randint(100, 140, (n, k // 32), generator=rng, dtype=torch.uint8)
    halves = codes.view(n, -1, 2, 16).numpy()
    packed = np.concatenate(
        (exponents.numpy()[..., None], halves[:, :, 0] | (halves[:, :, 1] << 4)), axis=-1
    )
    want = quants.dequantize(packed.reshape(n, -1), GGMLQuantizationType.MXFP4)
    weight = QuantizedWeight(format=FORMATS["mxfp4"], data=data, scale=exponents)
    assert np.array_equal(weight.dequantize().numpy(), want)

    scales = torch.randint(1, 0x7F, (n, k // 16), generator=rng, dtype=torch.uint8)
    small = codes.view(n, -1, 4, 2, 8).numpy()
    nibbles = (small[:, :, :, 0] | (small[:, :, :, 1] << 4)).reshape(n, -1, 32)
    packed = np.concatenate((scales.view(n, -1, 4).numpy(), nibbles), axis=-1)
    want = quants.dequantize(packed.reshape(n, -1), GGMLQuantizationType.NVFP4)
    factor = torch.tensor(0.5)
    for tensor_scale in (None, factor):
        weight = QuantizedWeight(
            format=FORMATS["nvfp4"],
            data=data,
            scale=scales.view(torch.float8_e4m3fn),
            tensor_scale=tensor_scale,
        )
        times = 1.0 if tensor_scale is None else 0.5
        assert np.array_equal(weight.dequantize().numpy(), want * times)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_gemm_is_linear_with_the_rounded_activations(
    rng: torch.Generator, name: str, dtype: str
) -> None:
    fmt, n, k = FORMATS[name], 10, 160
    weight = some_weight(rng, fmt, n, k)
    request = GemmRequest(n=n, k=k, dtype=dtype, weight_format=fmt, has_bias=True)
    x, bias = normal(rng, 7, k, dtype=dtype), normal(rng, n, dtype=dtype)
    x[2] = 0.0
    rounded = x.double()
    if fmt.activation != "float":
        rounded = round_activations(x.float(), fmt.activation).double()
        assert not torch.equal(rounded, x.double())
    want = functional.linear(rounded, values_one_by_one(weight).double(), bias.double())
    got = CATALOGUE["gemm"].reference(request, weight=weight, bias=bias)(x)
    tolerance = CATALOGUE["gemm"].tolerances[dtype]
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= tolerance.rtol * (1 + want.abs().max())).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_work_counts_the_bytes_of_the_real_tensors(rng: torch.Generator, name: str) -> None:
    fmt, n, k, t = FORMATS[name], 64, 192, 5
    weight = some_weight(rng, fmt, n, k)
    request = GemmRequest(n=n, k=k, dtype="bfloat16", weight_format=fmt)
    assert CATALOGUE["gemm"].bytes_moved(request, t) == nbytes(weight) + 2 * t * (n + k)
    unit = {"float": "bfloat16", "mxfp4_group32": "mxfp4", "nvfp4_group16": "nvfp4"}
    assert needed_work(request, t).unit == unit.get(fmt.activation, "fp8")


def test_grouped_products_take_mxfp4_experts(rng: torch.Generator) -> None:
    fmt = FORMATS["mxfp4_a8"]
    experts = [some_weight(rng, fmt, 6, 64) for _ in range(3)]
    request = GroupedGemmRequest(
        num_experts=3, experts_per_token=1, n=6, k=64, dtype="float64", weight_format=fmt
    )
    x = normal(rng, 5, 64)
    offsets = torch.tensor([0, 2, 2, 5])
    got = CATALOGUE["grouped_gemm"].reference(request, weight=experts)(x, offsets)
    rounded = round_activations(x.float(), "mxfp8_group32").double()
    want = torch.cat(
        (
            rounded[:2] @ values_one_by_one(experts[0]).double().T,
            rounded[2:] @ values_one_by_one(experts[2]).double().T,
        )
    )
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_weights_of_wrong_parts_are_refused(rng: torch.Generator) -> None:
    good = some_weight(rng, FORMATS["fp8_block128"], 130, 160)
    for fmt, data, scale, message in (
        ("fp8_block128", good.data, good.scale[:1], "one scale per 128 columns"),
        ("fp8_block128", good.data.float(), good.scale, "required data in float8_e4m3fn"),
        ("fp8_block128_ue8m0", good.data, good.scale, "scales in uint8, found"),
        ("mxfp4", torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1), "one scale per 32"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizedWeight(format=FORMATS[fmt], data=data, scale=scale)
    request = GemmRequest(
        n=130, k=160, dtype="float32", weight_format=FORMATS["fp8_block128_ue8m0"]
    )
    with pytest.raises(ValueError, match="required fp8_block128_ue8m0"):
        CATALOGUE["gemm"].reference(request, weight=good)
    with pytest.raises(ValueError, match="required an fp8 or fp4 format"):
        quantize_weight(torch.ones(4, 32), FORMATS["int4_g32"])


def test_formats_that_share_storage_share_weights(rng: torch.Generator) -> None:
    x = normal(rng, 3, 64, dtype="float32")
    weight = some_weight(rng, FORMATS["mxfp4"], 8, 64)
    for name in ("mxfp4", "mxfp4_a8", "mxfp4_a4"):
        request = GemmRequest(n=8, k=64, dtype="float32", weight_format=FORMATS[name])
        assert CATALOGUE["gemm"].reference(request, weight=weight)(x).shape == (3, 8)


def test_units_of_formats() -> None:
    units = {name: f.compute_dtype for name, f in FORMATS.items()}
    assert units["bfloat16"] == "bfloat16"
    assert units["int8_channel_a8"] == "int8"
    assert units["fp8_block128_a8"] == units["mxfp4_a8"] == units["fp8_block32_ue8m0_a8"] == "fp8"
    assert units["mxfp4_a4"] == "mxfp4"
    assert units["nvfp4_a4"] == "nvfp4"
    assert units["int4_g32"] == units["fp8_block128"] == units["mxfp4"] == ""


def test_every_scale_size_is_known() -> None:
    for fmt in FORMATS.values():
        size = fmt.weight_bytes(512, 512)
        scales = 0 if fmt.is_dense else math.prod(fmt.scale_shape(512, 512))
        assert size >= 512 * 512 * fmt.bits // 8 + scales
    assert set(LARGEST) >= {f.element for f in FORMATS.values()} - {"int"}


def test_quantize_op_is_the_rounding_of_the_formats(rng: torch.Generator) -> None:
    from hal.ops.quantize import QuantizeRequest

    x = normal(rng, 4, 256, dtype="bfloat16")
    cases: list[tuple[Any, Any, int, str]] = [
        ("fp8_e4m3fn", "float32", 128, "fp8_e4m3fn"),
        ("fp8_e4m3fn", "ue8m0", 32, "fp8_e4m3fn"),
        ("fp8_e4m3fnuz", "float32", 0, "fp8_e4m3fnuz"),
        ("int8", "float32", 0, "int8"),
        ("mxfp4", "ue8m0", 32, "fp4_e2m1"),
        ("nvfp4", "e4m3", 16, "fp4_e2m1"),
    ]
    for out, scale, group, element in cases:
        request = QuantizeRequest(
            group_size=group, out_dtype=out, scale_dtype=scale, width=256, dtype="bfloat16"
        )
        values, scales = CATALOGUE["quantize"].reference(request)(x)
        want = quantize_groups(x, group_size=group, element=element, scale_kind=scale)
        assert values.dtype == want[0].dtype
        assert torch.equal(values.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(scales.view(torch.uint8), want[1].view(torch.uint8))
        moved = x.nbytes + values.nbytes + scales.nbytes
        assert CATALOGUE["quantize"].bytes_moved(request, 4) == moved


def test_whether_a_minimum_is_a_zero_point_is_no_matter_of_the_name() -> None:
    """A format of another name means what its fields say."""
    n, k = 3, 128
    zero, scale = torch.randint(1, 16, (n, 2)).half(), torch.rand(n, 2).half() + 0.01
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    values = torch.stack((data & 15, data >> 4), dim=-1).view(n, 2, 64).double()
    of = {"int4_g64_zero": "mine", "int4_g64": "mine_zero"}
    for form, name in of.items():
        mine = dataclasses.replace(FORMATS[form], name=name, is_symmetric=False)
        weight = QuantizedWeight(format=mine, data=data, scale=scale, minimum=zero)
        wide, m = scale.double()[..., None], zero.double()[..., None]
        want = (values - m) * wide if form == "int4_g64_zero" else values * wide + m
        found = weight.dequantize().double().view(n, 2, 64)
        assert torch.allclose(found, want, rtol=2**-22, atol=2**-20)
    with pytest.raises(ValueError, match="zero points"):
        dataclasses.replace(FORMATS["int4_g64_zero"], is_symmetric=True)
