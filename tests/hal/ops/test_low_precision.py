"""Rounding to FP8, FP4 and powers of two, against all representable values and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.ops.low_precision import (
    LARGEST,
    decode_e2m1,
    decode_ue8m0,
    dequantize_groups,
    encode_e2m1,
    encode_fp8,
    encode_scale,
    encode_ue8m0,
    pack_nibbles,
    quantize_groups,
    round_activations,
    unpack_nibbles,
)
from op_inputs import UNTIMED, normal

# exponent bits, mantissa bits, bias, largest: from the formats' papers, not from torch.
SHAPES = {
    "fp8_e4m3fn": (4, 3, 7, 448.0),
    "fp8_e4m3fnuz": (4, 3, 8, 240.0),
    "fp8_e5m2": (5, 2, 15, 57344.0),
    "fp4_e2m1": (2, 1, 1, 6.0),
}


def magnitudes(element: str) -> list[float]:
    """Every finite value >= 0 of a small float, in the order of its codes."""
    exponents, mantissas, bias, largest = SHAPES[element]
    values = []
    for e in range(2**exponents):
        for m in range(2**mantissas):
            fraction = m / 2**mantissas
            whole = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
            values.append(whole)
    return [v for v in values if v <= largest]


def nearest(x: float, values: list[float]) -> float:
    """The nearest magnitude with x's sign; between two the one with the even code; saturating."""
    a = abs(x)
    if a >= values[-1]:
        return math.copysign(values[-1], x)
    code = min(range(len(values)), key=lambda i: (abs(values[i] - a), i % 2))
    return math.copysign(values[code], x)


def rounded(element: str, x: torch.Tensor) -> torch.Tensor:
    if element == "fp4_e2m1":
        return decode_e2m1(encode_e2m1(x))
    return encode_fp8(x, element).float()


@pytest.mark.parametrize("element", SHAPES)
def test_rounding_is_to_the_nearest_value(rng: torch.Generator, element: str) -> None:
    values = magnitudes(element)
    assert LARGEST[element] == values[-1]
    exact = torch.tensor(values)
    middles = (exact[1:] + exact[:-1]) / 2
    beside = torch.cat((torch.nextafter(middles, exact[1:]), torch.nextafter(middles, exact[:-1])))
    spread = normal(rng, 300).float() * exact[-1] * torch.rand(300, generator=rng) ** 8
    huge = torch.tensor([exact[-1] * 1.5, 1e30])
    for x in (exact, middles, beside, spread, huge):
        both = torch.cat((x, -x))
        want = torch.tensor([nearest(v, values) for v in both.tolist()])
        assert torch.equal(rounded(element, both), want)


def test_e2m1_codes_by_hand() -> None:
    x = torch.tensor([0.0, -0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 9.0, -0.5, -7.0])
    assert encode_e2m1(x).tolist() == [0, 8, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 9, 15]
    codes = torch.arange(16, dtype=torch.uint8)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert decode_e2m1(codes).tolist() == positive + [-v for v in positive]


def test_the_even_column_is_the_low_nibble(rng: torch.Generator) -> None:
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    codes = torch.randint(0, 16, (5, 3, 8), generator=rng, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_ue8m0_is_torchs_type() -> None:
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(decode_ue8m0(codes), want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(encode_ue8m0(decode_ue8m0(codes[:255])), codes[:255])


@UNTIMED
@given(st.integers(min_value=1, max_value=0x7F7FFFFF))
def test_ue8m0_rounds_up_to_a_power_of_two(bits: int) -> None:
    """Every positive float32, denormals too."""
    scale = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    found = 2.0 ** (int(encode_ue8m0(scale)[0]) - 127)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    value = math.ldexp(fraction + (0x800000 if exponent else 0), max(exponent, 1) - 150)
    mantissa, exponent = math.frexp(value)
    above = math.ldexp(1.0, exponent - (mantissa == 0.5))
    assert found == min(max(above, 2.0**-127), 2.0**127)


def test_a_scale_that_is_not_finite_is_nan() -> None:
    bad = torch.tensor([float("nan"), float("inf")])
    assert encode_ue8m0(bad).tolist() == [255, 255]
    for kind in ("float32", "ue8m0", "e4m3"):
        x = torch.tensor([[1.0, float("nan")], [float("-inf"), 2.0], [1.0, 2.0], [0.0, 0.0]])
        for element in ("fp8_e4m3fn", "fp4_e2m1", "int8"):
            values, scales = quantize_groups(x, group_size=2, element=element, scale_kind=kind)
            back = dequantize_groups(values, scales, element=element, scale_kind=kind)
            assert back[:2].isnan().all()
            assert back[2:].isfinite().all()
            assert back[3].tolist() == [0.0, 0.0]


def test_e4m3_scales_of_nonzero_groups_are_not_zero() -> None:
    scales = torch.tensor([1e-9, 2.0**-9, 3.0, 1e9])
    assert encode_scale(scales, "e4m3").float().tolist() == [2.0**-9, 2.0**-9, 3.0, 448.0]


@pytest.mark.parametrize("kind", ["float32", "ue8m0", "e4m3"])
@pytest.mark.parametrize("element", ["fp8_e4m3fn", "fp8_e4m3fnuz", "int8", "fp4_e2m1"])
@pytest.mark.parametrize("group", [2, 16, 0])
def test_groups_one_value_at_a_time(
    rng: torch.Generator, kind: str, element: str, group: int
) -> None:
    x = normal(rng, 5, 48, dtype="float32") * torch.tensor([[1.0], [1e-3], [90.0], [0.0], [3.0]])
    values, scales = quantize_groups(x, group_size=group, element=element, scale_kind=kind)
    got = dequantize_groups(values, scales, element=element, scale_kind=kind)
    width = group or 48
    e4m3 = magnitudes("fp8_e4m3fn")
    for row in range(5):
        for first in range(0, 48, width):
            part = x[row, first : first + width].numpy()
            peak = np.float32(np.abs(part).max())
            scale = peak / np.float32(LARGEST[element]) if peak else np.float32(1)
            if kind == "ue8m0":
                scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
            elif kind == "e4m3":
                scale = np.float32(max(nearest(float(scale), e4m3), 2.0**-9 if peak else 0.0))
            for column, value in enumerate(part):
                quotient = np.float32(value / scale)
                if element == "int8":
                    exact = float(np.clip(np.rint(quotient), -127, 127))
                else:
                    exact = nearest(float(quotient), magnitudes(element))
                assert float(got[row, first + column]) == np.float32(exact) * scale


def test_powers_of_two_never_saturate(rng: torch.Generator) -> None:
    """Rounding the scale up leaves room: the largest value is within half a step."""
    x = normal(rng, 64, 32, dtype="float32") * 10 ** (normal(rng, 64, 1, dtype="float32") * 4)
    for element, step in (("fp8_e4m3fn", 2.0**-4), ("fp4_e2m1", 2.0**-2)):
        values, scales = quantize_groups(x, group_size=32, element=element, scale_kind="ue8m0")
        back = dequantize_groups(values, scales, element=element, scale_kind="ue8m0")
        peak = x.abs().amax(dim=1)
        at = x.abs().argmax(dim=1, keepdim=True)
        error = (back.gather(1, at) - x.gather(1, at)).abs()[:, 0]
        assert (error <= peak * step * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("rounding", "element", "group", "kind"),
    [
        ("fp8_per_token", "fp8_e4m3fn", 0, "float32"),
        ("fp8_group128", "fp8_e4m3fn", 128, "float32"),
        ("fp8_group128_ue8m0", "fp8_e4m3fn", 128, "ue8m0"),
        ("fp8_group32", "fp8_e4m3fn", 32, "float32"),
        ("mxfp8_group32", "fp8_e4m3fn", 32, "ue8m0"),
        ("mxfp4_group32", "fp4_e2m1", 32, "ue8m0"),
        ("nvfp4_group16", "fp4_e2m1", 16, "e4m3"),
    ],
)
def test_activations_round_in_groups_and_the_last_may_be_cut(
    rng: torch.Generator, rounding: str, element: str, group: int, kind: str
) -> None:
    x = normal(rng, 3, 200, dtype="float32")
    got = round_activations(x, rounding)
    for first in range(0, 200, group or 200):
        part = x[:, first : first + (group or 200)]
        values, scales = quantize_groups(part, group_size=0, element=element, scale_kind=kind)
        want = dequantize_groups(values, scales, element=element, scale_kind=kind)
        assert torch.equal(got[:, first : first + part.shape[1]], want)
